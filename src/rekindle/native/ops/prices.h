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
// Until the device has run an operator and passed its events, the cost is an estimate. It is a
// microsecond for the launch, plus the time to write the results at 1 TB/s.
class Prices final {
public:
    // The device events before and after one call of `signature`. Events of other calls may lie
    // between these two.
    class Pair final {
    public:
        Pair(c10::intrusive_ptr<Signature> what, const c10::Stream& stream);

        c10::intrusive_ptr<Signature> signature;
        c10::Event start;
        c10::Event end;
    };

    // Record the times of calls whose events the device has passed. Return true if another call of
    // `signature` should be measured. Return false while many measurements are pending.
    bool wants_more(Signature& signature);

    void add(Pair pair) { pending_.push_back(std::move(pair)); }

private:
    std::deque<Pair> pending_;
};

}  // namespace rekindle
