// Measures how long operators run on an accelerator.
#pragma once

#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>

#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Measures the cost of operators by pairs of device events, without waiting for the device.
//
// Until the device has passed the events of an operator, its cost is an estimate: a microsecond for
// the launch, plus the time to move its results at 1 TB/s.
class Prices final {
public:
    // The device events before and after one call of `signature`. Events of other calls may lie
    // between them.
    class Pair final {
    public:
        Pair(c10::intrusive_ptr<Signature> what, const c10::Stream& stream);

        c10::intrusive_ptr<Signature> signature;
        c10::Event start;
        c10::Event end;
    };

    // Process the pairs of events that the device has passed. Return true if `signature` should be
    // measured once more: a cost needs three measurements, so many pending pairs would be useless.
    bool wants_more(Signature& signature);

    void add(Pair pair) { pending_.push_back(std::move(pair)); }

private:
    std::deque<Pair> pending_;
};

}  // namespace rekindle
