"""What the native core does not do yet, test by test: each is expected to fail."""

from __future__ import annotations

NOT_YET: dict[str, tuple[str, ...]] = {
    "an error that TorchScript swallowed is not told again": (
        "test_rules_errors::test_out_of_budget_that_others_turn_into_something_else[native-saved]",
    ),
    "memory lent to others after it was made is recomputed, or read, without a look": (
        "test_rules_foreign::test_a_buffer_that_is_filled_again[native-lent to NumPy before-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_numpy-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_array-saved]",
        "test_rules_foreign::test_a_value_written_from_outside[native-_by_another_process-saved]",
        (
            "test_rules_foreign::test_a_source_written_from_outside_after"
            "_recipes_read_it[native-saved]"
        ),
        "test_rules_foreign::test_what_saves_more_bytes_is_done[native]",
        "test_rules_foreign::test_weights_that_others_modify_meanwhile[native-saved]",
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
    "a result that its own node saved is what its variable is given as .data since": tuple(
        "test_rules_versions::test_other_data_for_a_result_that_its_own_node_saved"
        f"[native-{made}-saved]"
        for made in ("exp", "tanh_", "apply")
    ),
    "the end of an empty view is taken for what it needs": (
        "test_rules_values::test_an_empty_view_past_the_end[native]",
    ),
    "`out=` that makes a tensor larger is one version ahead of its record": (
        "test_rules_versions::test_a_result_that_its_memory_grew_for[native]",
    ),
    "sums that stay in memory of the size of what was summed up are larger than predicted": (
        "test_rules_predicted::test_patches[native]",
        *(
            f"test_rules_predicted::test_a_loss[native-{name}-{reduction}]"
            for name in ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
            for reduction in ("mean", "sum")
        ),
    ),
    "sizes that values decide are bounded from above, or not known before": (
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-unique-saved]",
        (
            "test_rules_sizes::test_what_values_decide_is_found_out_first"
            "[native-repeat_interleave-saved]"
        ),
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-bincount-saved]",
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-masked_select-saved]",
        "test_rules_sizes::test_what_values_decide_is_found_out_first[native-index-saved]",
        "test_rules_sizes::test_what_nobody_can_know_is_noticed_afterwards[native-to_dense-saved]",
        (
            "test_rules_sizes::test_what_nobody_can_know_is_noticed_after"
            "wards[native-a custom operator-saved]"
        ),
    ),
}
