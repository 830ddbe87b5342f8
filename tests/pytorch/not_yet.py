"""What the native core does not do yet, test by test: each is expected to fail."""

from __future__ import annotations

NOT_YET: dict[str, tuple[str, ...]] = {
    "an error that TorchScript swallowed is not told again": (
        "test_rules_errors::test_out_of_budget_that_others_turn_into_something_else[native-saved]",
    ),
    "a result that its own node saved is what its variable is given as .data since": tuple(
        "test_rules_versions::test_other_data_for_a_result_that_its_own_node_saved"
        f"[native-{made}-saved]"
        for made in ("exp", "tanh_", "apply")
    ),
}
