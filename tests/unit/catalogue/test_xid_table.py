import pytest

from aimaster.catalogue import load_xids
from aimaster.catalogue.xid import FOLLOWERS, sxid_is_fatal

TABLE = load_xids()


def test_the_table_knows_every_code_once():
    """Codes 1 to 176 have a row each, with a category, an action and whose fault it is."""
    assert TABLE.codes() == tuple(range(1, 177))


@pytest.mark.parametrize("code", sorted(FOLLOWERS))
def test_followers_never_are_roots(code):
    """43, 45, 63, 92, 137 and 154 follow or point to another event."""
    assert TABLE.read(code, "").follower


@pytest.mark.parametrize(
    ("code", "text", "action"),
    [
        (94, "Contained: CE User Channel (0x9). RST: No, D-RST: No", "restart_process"),
        (94, "Contained: CE User Channel (0x9). RST: Yes, D-RST: No", "replace_node"),
        (95, "Uncontained: LTC TAG (0x2, 0x1). RST: Yes, D-RST: No", "replace_node"),
        (79, "GPU has fallen off the bus.", "replace_node"),
        (145, "RLW_RXPIPE Nonfatal XC0 i0 Link 08 (0x0 0x00000004 0x0 0x0 0x0 0x0)", "ignore"),
        (145, "RLW_REMAP Fatal XC0 i0 Link 08 (0x0 0x00000040 0x0 0x0 0x0 0x0)", "replace_node"),
        (145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0 0x0 0x0 0x0)", "ignore"),
        (146, "TLW_RX Fatal XC0 i0 Link 01 (0x0 0x00000004 0x0 0x0 0x0 0x0)", "replace_node"),
        (147, "TREX Fatal XC0 i0 Link 01 (0x0 0x00000001 0x0 0x0 0x0 0x0)", "ignore"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0 0x0 0x0 0x0 0x0)", "replace_node"),
        (149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 08 (0x0 0x0 0x0 0x0 0x0 0x0)", "ignore"),
        (150, "MSE_WATCHDOG Nonfatal XC0 i0 Link -1 (0x0 0x1 0x0 0x0 0x0 0x0)", "replace_node"),
    ],
)
def test_the_words_of_the_line_decide(code, text, action):
    """Reset words, unit and error status decide, not the code or the word Fatal alone."""
    assert TABLE.read(code, text).action == action


def test_an_unknown_code_blames_nobody():
    """A code newer than the table is shown, never acted upon."""
    assert TABLE.read(999, "what").follower


def test_the_word_in_an_sxid_line_outweighs_its_code():
    """12028 Non-fatal is not fatal; a fatal word is."""
    assert not sxid_is_fatal(12028, "Non-fatal")
    assert sxid_is_fatal(20034, "Fatal")
    assert sxid_is_fatal(23001, "")
