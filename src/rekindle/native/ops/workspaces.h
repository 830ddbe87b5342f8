// What operators have in use inside themselves beside what they make, and give back.
//
// A convolution's scratch, the workspaces of cuBLAS and cuDNN, what a composite operator computes
// on its way: no dispatcher shows them, only the allocator. It is the same at every call of a
// signature, so the first calls tell, and room is made for it before all others. Before the first
// call of all there is a guess, and room as far as it can be had.
#pragma once

#include <optional>

#include "../base/types.h"
#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// What an allocator says of one call.
struct Used final {
    Bytes inside;  // the most in use while it ran, beside what is there after it
    Bytes kept;    // what is there after it beside what was there before
};

// One call that runs now, as the allocator sees it: of the device, or the one that counts.
class Watched final {
public:
    explicit Watched(const Device& device);
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;
    Watched(Watched&&) = delete;
    Watched& operator=(Watched&&) = delete;
    ~Watched();

    // Whether there is an allocator that tells.
    static bool possible(const Device& device) noexcept;

    // It ran. Nothing: nobody can tell.
    std::optional<Used> end() const;

private:
    const Device& device_;
    bool counts_;
    Bytes before_ = 0;
    Bytes returned_ = 0;
};

// They are learned for as long as the process lives, as signatures are: a budget knows what those
// before it saw. Not without the core's lock.

// A call took so much.
void learn_workspace(Signature& signature, const Used& used, const Device& device);
// What the first call of a signature may take; on a CPU nothing, if it is not one of those that do.
Bytes guess_workspace(const Signature& signature, const Device& device);
// What operators of each kind took is not known any more.
void forget_workspaces() noexcept;

}  // namespace rekindle
