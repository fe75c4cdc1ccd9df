"""The thirty cases in which other engines failed their users, each with the tests that hold it here."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FLOW = HERE.parent.parent / "flow"

CASES = {
    1: "crash whatever_is_killed_the_newest_whole_step_loads_with_every_element_its_own",
    2: "acceptance a_trainer_killed_at_each_of_its_calls_never_loses_or_mixes_a_step",
    3: "powercut a_cut_at_any_call_of_a_flush_or_of_retention_leaves_a_whole_checkpoint; retain the_newest_checkpoint_is_never_deleted",
    4: (
        "flush every_failure_of_the_disk_leaves_the_checkpoint_before_intact;"
        " storage_trouble a_storage_in_trouble_is_told_to_the_trainer_and_harms_nothing"
    ),
    5: "acceptance a_too_small_dev_shm_is_refused_when_memory_is_taken_and_never_a_sigbus_later",
    6: (
        "garbage the_next_start_adopts_or_frees_what_a_killed_run_left_and_a_clean_end_leaves_nothing;"
        " acceptance stale_names_in_memory_are_no_error"
    ),
    7: "acceptance memory_unlinked_from_under_us_is_noticed_and_the_next_tier_is_taken",
    8: (
        "engine what_changes_before_the_optimizer_is_copied_at_once; engine copy_mode_returns_when_everything_may_change;"
        " writeprotect what_changes_right_after_the_save_never_shows_in_it"
    ),
    9: "engine a_tensor_that_moved_between_saves_is_saved_from_its_new_place",
    10: "gpu a_step_right_after_the_save_never_shows_in_it",
    11: "acceptance saves_to_memory_go_on_while_a_flush_hangs_and_neither_is_lost_or_mixed; engine no_free_slot_skips_the_save_and_counts_it",
    12: "engine a_step_is_restored_only_when_all_ranks_have_it",
    13: "sigterm the_last_save_reaches_storage_by_the_helper",
    14: (
        "engine a_damaged_copy_falls_to_the_next_tier_and_says_so; nearest of_every_shard_only_the_bad_copy_is_replaced;"
        " flips every_byte_in_memory; flips every_byte_of_a_copy_held_for_a_peer; flips every_byte_on_storage"
    ),
    15: "acceptance memory_is_bounded_by_two_copies_and_refused_before_it_is_taken",
    16: "contents many_tensors_need_no_descriptor_each; acceptance a_low_limit_of_descriptors_is_no_limit_of_tensors",
    17: (
        "acceptance a_helper_that_cannot_live_or_does_not_answer_is_told_and_never_a_hang;"
        " engine a_killed_helper_is_replaced_at_the_next_save"
    ),
    18: "engine a_failed_flush_is_raised_by_the_next_save_which_still_saves",
    19: "flush files_follow_the_umask_and_parents_keep_their_mode; shm a_folder_of_someone_else_is_refused",
    20: "acceptance only_one_process_touches_storage_and_no_rank_polls_for_anothers_file",
    21: "ranks two_ranks_to_four_to_a_mesh_to_one_and_back; reshard any_cut_is_made_of_any_other",
    22: (
        "contents a_fresh_trainer_goes_on_exactly_where_the_saved_one_was; contents an_optimizer_of_other_groups_is_named_and_nothing_is_changed;"
        " contents a_state_that_does_not_fit_is_named_and_left_as_it_was"
    ),
    23: "contents zero_dim_steps_keep_shape_and_type_under_a_half_precision_model",
    24: "contents every_type_comes_back_bit_equal; contents what_cannot_be_saved_is_refused_by_name_and_the_next_save_works",
    25: "contents tied_tensors_are_stored_once_and_stay_tied; contents a_view_stores_only_its_own_bytes",
    26: "acceptance one_tensor_of_more_than_four_gibibytes",
    27: "resume the_resumed_losses_are_those_of_the_uninterrupted_run",
    28: (
        "acceptance nothing_executable_is_written_or_read; acceptance a_segment_that_asks_for_code_holds_only_text;"
        " cli a_malicious_dcp_folder_is_refused_and_not_run"
    ),
    29: "acceptance a_new_engine_in_the_same_process_takes_nothing_of_an_old_save_for_its_own",
    30: "flush file_systems_with_short_writes_or_no_direct_ones_get_the_same_bytes",
}  # fmt: skip


def named_in(name):
    """Names of the tests of one file, without their first words."""
    (path,) = (one for folder in (HERE, FLOW) if (one := folder / f"test_ckpt_{name}.py").exists())
    found = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("number", range(1, 31))
def test_each_case_has_its_tests(number):
    for place in CASES[number].split(";"):
        file, name = place.split()
        assert f"test_{name}" in named_in(file)
