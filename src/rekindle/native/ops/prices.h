// What operators cost on a device.
#pragma once

#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>

#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Prices operators by pairs of events. Nothing ever waits for the device.
//
// Until its events have happened an operator costs what moving its results takes at 1 TB/s, and a
// microsecond for the launch: the order of things, for the first steps.
class Prices final {
public:
    // A call of `signature` begins, and ends. Between the two others may be asked about.
    class Pair final {
    public:
        Pair(c10::intrusive_ptr<Signature> what, const c10::Stream& stream);

        c10::intrusive_ptr<Signature> signature;
        c10::Event start;
        c10::Event end;
    };

    // Looks at what has happened meanwhile. Whether one more is of use: more wait in vain, for a
    // price takes three.
    bool wants_more(Signature& signature);

    void add(Pair pair) { pending_.push_back(std::move(pair)); }

private:
    std::deque<Pair> pending_;
};

}  // namespace rekindle
