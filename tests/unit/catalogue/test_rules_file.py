import pytest

from aimaster.catalogue import RuleError, load


def test_a_users_sign_retryable_strings_and_switched_off_signs(tmp_path):
    """A rules file adds signs, declares strings worth another try, and switches signs off."""
    rules = tmp_path / "mine.toml"
    rules.write_text(
        """
disable = ["torch.cuda-oom"]
retryable = ["lease on shard expired"]
[[sign]]
id = "door"
literal = "cabinet door open"
pattern = "cabinet door open on (?P<node>\\\\S+)"
category = "node.lost"
role = "accusation"
"""
    )
    catalogue = load([rules])
    (door,) = catalogue.match("ALERT cabinet door open on node-3")
    assert (door.sign.id, door.finding(node=None).subject.node) == ("mine.door", "node-3")
    (again,) = catalogue.match("RuntimeError: lease on shard expired (7)")
    assert (again.sign.category, again.finding(node="n").weight) == ("app.retryable", 90)
    assert catalogue.match("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 5 has") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("disabel = []", "unknown key 'disabel'"),
        ('disable = ["torch.nothing"]', "there is no such sign"),
        ('[[sign]]\nid = "a"\nliteral = "abcdefgh"\npattern = "("\ncategory = "unknown"', "pattern"),
        ('[[sign]]\nid = "a"\nliteral = "abc"\npattern = "abc"\ncategory = "unknown"', "shorter than"),
        ('[[sign]]\nid = "a"\nliteral = "abcdefgh"\npattern = "a"\ncategory = "gpu.sad"', "unknown category"),
        ('[[sign]]\nid = "a"\nliteral = "abcdefgh"\npattern = "a"\ncategory = "unknown"\ncolour = 1', "colour"),
        ("= 3", "rules file"),
    ],
)
def test_a_wrong_rules_file_is_refused_with_the_reason(tmp_path, text, says):
    """Errors name what is wrong in the file; nothing is ignored in silence."""
    rules = tmp_path / "mine.toml"
    rules.write_text(text)
    with pytest.raises(RuleError, match=says):
        load([rules])
