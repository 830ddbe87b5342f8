// The one place where a recomputation gives the lock back: around the kernel.
#pragma once

#include <c10/util/SmallVector.h>

#include <span>
#include <utility>

#include "../base/mutex.h"
#include "../ops/kernel_operands.h"
#include "../torch/homes.h"
#include "driver.h"
#include "recipe.h"

namespace rekindle {

// While it lives the kernel of `recipe` runs, which may be anybody's code: it may ask the core for
// something, start threads, and wait for them. So others may have the lock, and the budget counts
// what the kernel takes as in flight. Afterwards whoever recomputes looks up again all that it had
// looked up (`Engine::Interlude`).
//
// What stays as it is meanwhile: the memory of `operands`, which they keep; the input that the
// kernel writes in place, which is nobody else's; records and calls, which are not disposed of amid
// an event. What variables hold is not let go
// while an operator runs that may read anything.
class Recomputing final : public Mutex::Opening {
public:
    Recomputing(
        Driver& driver, const Recipe& recipe, bool in_place, std::span<const Home> operands
    );
    Recomputing(const Recomputing&) = delete;
    Recomputing& operator=(const Recomputing&) = delete;
    Recomputing(Recomputing&&) = delete;
    Recomputing& operator=(Recomputing&&) = delete;
    ~Recomputing() override;

    // The kernel failed before it wrote anything: unless somebody came meanwhile, the input that it
    // was to write is there as before. Otherwise that is gone.
    void undo() noexcept { undoes_ = true; }

protected:
    void is_visited() noexcept override;

private:
    Driver& driver_;
    const Recipe& recipe_;
    const KernelOperands operands_;
    const bool opens_;
    const bool reads_anything_;
    bool undoes_ = false;
    c10::SmallVector<std::pair<Record*, Home>, 1> lent_;
    Engine::Interlude interlude_;
};

}  // namespace rekindle
