// Where memory suffices nobody has to choose, so nobody has to prepare for it. Twin of
// rekindle.engine._asleep.
#pragma once

#include "chooser.h"

namespace rekindle {

// In the place of a chooser until the first choice; hears nothing, for the graph remembers.
class Asleep final : public Chooser {
public:
    void add(Storage& /*storage*/) override {}

    void remove(Storage& /*storage*/) override {}

    Storage* choose(Nanoseconds /*now*/) override { return nullptr; }
};

}  // namespace rekindle
