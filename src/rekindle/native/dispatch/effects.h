// What an operator that is written in Python does beside its results, the first time that it runs.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/driver.h"

namespace rekindle {

// While it lives, the operators that the kernel of an untrusted operator calls come here, one by
// one. They pass: none is recorded. But what one of them writes was not made inside is noted, and
// is right for everybody else (R3, R4), and so is what talks to other processes.
class Effects final {
public:
    // `inputs`: what the operator reads, of which it may write nothing; empty: only its own
    // operators are looked at, not what kernels write that nobody sees.
    Effects(Driver& driver, std::span<const StoragePtr> inputs);
    Effects(const Effects&) = delete;
    Effects& operator=(const Effects&) = delete;
    Effects(Effects&&) = delete;
    Effects& operator=(Effects&&) = delete;
    // With the lock.
    ~Effects();

    // While it lives, operators of this thread come to `effects`; null: to nobody.
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

    // Whose operators this thread runs; null: nobody's.
    static Effects* current() noexcept;

    // Runs an operator of the kernel's. The lock is given back.
    void run(
        const Facts& facts,
        const c10::OperatorHandle& op,
        c10::DispatchKeySet keys,
        torch::jit::Stack& stack,
        Locked& lock
    );

    // The kernel is over. Returns what it did beside its results; null: nothing.
    const char* found() const;

private:
    void look_at(const Facts& facts, const torch::jit::Stack& stack);
    void about_to_write(const c10::TensorImpl& tensor);

    Driver& driver_;
    std::vector<std::pair<StoragePtr, std::uint64_t>> checksums_;  // of the inputs, before it ran
    std::unordered_set<const c10::StorageImpl*> made_;  // inside, and perhaps gone by now
    const char* found_ = nullptr;
};

}  // namespace rekindle
