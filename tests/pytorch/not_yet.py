"""What the native core does not do yet, test by test: each is expected to fail."""

from __future__ import annotations

NOT_YET: dict[str, tuple[str, ...]] = {
    "errors that TorchScript swallows": (
        "test_rules_errors::test_out_of_budget_that_others_turn_into_something_else[native-saved]",
    ),
    "memory of others is not checked by a sum, and what is made from it is kept": (
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-NumPy-saved]",
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-lent to NumPy before-saved]",
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-a buffer-saved]",
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-DLPack-saved]",
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-shared memory-saved]",
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-a mapped file-saved]",
        "test_rules_foreign::test_what_autograd_saved_of_it_is_what_is_there_then[native-saved]",
        "test_rules_foreign::test_written_by_the_program_as_well[native-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_numpy-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_array-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_dlpack-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_capsule-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_numpy_dlpack-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_storage-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_bytes-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_another_storage-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_another_process-saved]",
        "test_rules_foreign::test_a_source_written_from_outside_after_recipes_read_it[native-saved]",
        "test_rules_foreign::test_what_saves_more_bytes_is_done[native]",
        "test_rules_foreign::test_weights_in_foreign_memory[native-saved]",
        "test_rules_foreign::test_weights_that_others_modify_meanwhile[native-saved]",
        "test_rules_foreign::test_a_look_by_numpy_costs_no_more_than_it_must[native]",
        "test_rules_foreign::test_a_write_by_address_is_seen_if_it_is_declared[native-_fill-False]",
        "test_rules_foreign::test_a_write_by_address_is_seen_if_it_is_declared[native-fill1-True]",
    ),
    "a mean that is carried along keeps its batches": (
        "test_rules_leaks::test_a_mean_of_losses_keeps_no_batch[native-mse_loss-{}]",
        "test_rules_leaks::test_a_mean_of_losses_keeps_no_batch[native-smooth_l1_loss-{}]",
        "test_rules_leaks::test_a_mean_of_losses_keeps_no_batch[native-_squares-{}]",
    ),
    "leaves are the very objects only while the run is there": (
        "test_rules_leaves::test_attributes_of_a_saved_parameter[native-False-saved]",
        "test_rules_leaves::test_they_are_the_very_objects_also_after_the_context[native]",
    ),
    "what is kept": (
        "test_rules_report::test_a_kept_view_keeps_the_whole[native]",
        "test_rules_report::test_what_is_kept_goes_when_nobody_needs_it[native]",
    ),
    "sizes that values decide are bounded, not found out": (
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-unique-saved]",
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-repeat_interleave-saved]",
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-bincount-saved]",
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-masked_select-saved]",
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-index-saved]",
        "test_rules_sizes::test_what_nobody_can_know_is_noticed_afterwards[native-to_dense-saved]",
        "test_rules_sizes::test_what_nobody_can_know_is_noticed_afterwards[native-a custom operator-saved]",
    ),
}
