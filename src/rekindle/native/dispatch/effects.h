// Finds side effects of operators that are written in Python. An operator with side effects is
// never recomputed.
#pragma once

#include <ATen/core/stack.h>

#include <cstdint>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/driver.h"
#include "../ops/operator_call.h"

namespace rekindle {

// Observes one call of an operator that is written in Python and not trusted yet. While this object
// lives, every inner operator (one that the kernel calls) goes through `run`. Inner operators get
// no recipe. Three kinds of side effects are noted: writes to memory that was not made inside the
// kernel, random numbers from a generator of the program, and communication with other processes.
// Each such write is also registered as a write without a recipe, so that other values stay correct
// (R3, in-place writes; R4, sources).
class Effects final {
public:
    // inputs: storages that the operator reads and must not write. Comparing their checksums shows
    // writes by kernels that call no operator. If empty, only inner operators are observed.
    Effects(Driver& driver, std::span<const StoragePtr> inputs);
    Effects(const Effects&) = delete;
    Effects& operator=(const Effects&) = delete;
    Effects(Effects&&) = delete;
    Effects& operator=(Effects&&) = delete;
    // The session mutex must be held.
    ~Effects();

    // Scope in which `effects` checks each operator that this thread calls for side effects. If
    // `effects` is null, no operator is checked.
    class Watching final {
    public:
        explicit Watching(Effects* effects) noexcept;
        Watching(const Watching&) = delete;
        Watching& operator=(const Watching&) = delete;
        Watching(Watching&&) = delete;
        Watching& operator=(Watching&&) = delete;
        ~Watching();

    private:
        Effects* const before_;
    };

    // Return the `Effects` object that checks the operators of this thread, or null if none does.
    static Effects* current() noexcept;

    // Check an operator that the observed kernel calls for side effects, and run the operator. The
    // session mutex is released while the operator runs.
    void run(const Facts& facts, OperatorCall& call, Locked& lock);

    // Return a side effect of the observed kernel as text, or null if it had none. Must be called
    // after the kernel has run.
    const char* found() const;

private:
    void look_at(const Facts& facts, const torch::jit::Stack& stack);
    void about_to_write(const c10::TensorImpl& tensor);

    Driver& driver_;
    // Checksums of the operator's inputs before the kernel ran.
    std::vector<std::pair<StoragePtr, std::uint64_t>> checksums_;
    // Storages made inside the observed kernel. Some may be freed already.
    std::unordered_set<const c10::StorageImpl*> made_;
    const char* found_ = nullptr;
};

}  // namespace rekindle
