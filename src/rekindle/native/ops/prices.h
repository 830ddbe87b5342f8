// Measures the costs of operators on a device.
#pragma once

#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>

#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Measures operators by pairs of events, and never waits for the device.
//
// Until the events of an operator have completed, its cost is an estimate: a microsecond for the
// launch, and the time to move its results at 1 TB/s.
class Prices final {
public:
    // Events around one call of `signature`. Other calls may come between them.
    class Pair final {
    public:
        Pair(c10::intrusive_ptr<Signature> what, const c10::Stream& stream);

        c10::intrusive_ptr<Signature> signature;
        c10::Event start;
        c10::Event end;
    };

    // Process the pairs that have completed. Return true if measuring `signature` once more is
    // useful; too many pending pairs would be useless, because a cost needs three.
    bool wants_more(Signature& signature);

    void add(Pair pair) { pending_.push_back(std::move(pair)); }

private:
    std::deque<Pair> pending_;
};

}  // namespace rekindle
