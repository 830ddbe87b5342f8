// Stand-in for the policy until the first eviction. A program that fits into the budget then pays
// nothing for the policy's bookkeeping. Twin of rekindle.engine._null_chooser.
#pragma once

#include "chooser.h"

namespace rekindle {

// Policy that ignores all events, used until the first eviction. Then the ledger builds the real
// policy's state from the graph.
class NullChooser final : public Chooser {
public:
    void add(Storage& /*storage*/) override {}

    void remove(Storage& /*storage*/) override {}

    Storage* choose(Nanoseconds /*now*/) override { return nullptr; }
};

}  // namespace rekindle
