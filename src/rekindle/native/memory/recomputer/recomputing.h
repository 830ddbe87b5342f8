// Releases the session mutex around the kernel of a recomputation.
#pragma once

#include <c10/util/SmallVector.h>

#include <span>
#include <utility>

#include "../../base/mutex.h"
#include "../../ops/kernel_operands.h"
#include "../../torch/storage_ptr.h"
#include "../records/recipe.h"
#include "../room/frees.h"
#include "in_progress.h"

namespace rekindle {

// Scope in which the kernel of `recipe` runs during a recomputation, without the session mutex.
//
// The kernel may be the user's code: it may call the core, start threads, and wait for them. So the
// scope releases the mutex, and the kernel's memory counts as in flight. If another thread took the
// mutex, the interrupted event looks up all of its state again when the scope ends
// (`Engine::Interlude`).
//
// Some state does not change while the mutex is released. `operands_` keeps the memory of the
// operands alive. Nothing else refers to an input that the kernel writes in place. Records and
// recipes are not destroyed during an event. User-held values are not evicted while an operator
// runs that may read any of them.
class Recomputing final : public Mutex::Opening {
public:
    Recomputing(
        Frees& frees,
        InProgress& in_progress,
        Recipe& recipe,
        bool in_place,
        std::span<const StoragePtr> operands
    );
    Recomputing(const Recomputing&) = delete;
    Recomputing& operator=(const Recomputing&) = delete;
    ~Recomputing() override;

    // Record that the kernel failed before it wrote anything. The destructor then restores the
    // input that the kernel would have written in place. If another thread took the mutex
    // meanwhile, the input is lost.
    void undo() noexcept { undoes_ = true; }

protected:
    void is_visited() noexcept override;

private:
    Frees& frees_;
    InProgress& in_progress_;
    const Recipe& recipe_;
    const KernelOperands operands_;
    const bool opens_;
    const bool reads_anything_;
    bool undoes_ = false;
    c10::SmallVector<std::pair<StorageRecord*, StoragePtr>, 1> lent_;
    Engine::Interlude interlude_;
};

}  // namespace rekindle
