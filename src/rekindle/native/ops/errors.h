// Errors that the native core throws. Each error holds numbers. Where PyTorch or Python called the
// core, `translate_errors` (memory/notify.h) turns the error into a Python exception.
// The classes derive from `std::exception`, because autograd's threads catch nothing else.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "../base/types.h"

namespace rekindle {

class Session;
struct Facts;

// Base class of the native core's errors.
class Error : public std::exception {
public:
    // `said`: the C++ message. Only C++ code that catches the error sees this message.
    explicit Error(const char* said) noexcept : said_(said) {}

    // Throw the Python exception that the program gets for this error.
    [[noreturn]] virtual void raise(Session& session) const = 0;

    const char* what() const noexcept override { return said_; }

private:
    const char* said_;
};

// The budget has no room for an operator. The operator `who` needs `needed` more bytes, of which
// `inside` are workspace.
struct OutOfBudgetError final : Error {
    OutOfBudgetError(Bytes more, Bytes there, Bytes most, std::string whose)
        : Error("out of memory: the budget has no room for what comes next"),
          needed(more),
          memory(there),
          budget(most),
          who(std::move(whose)) {}

    [[noreturn]] void raise(Session& session) const override;

    Bytes needed;
    Bytes memory;
    Bytes budget;
    Bytes inside = 0;
    Bytes operands = 0;  // bytes of the operator's arguments, which must be in memory
    // Number of bytes that the operator probably needs; 0 if `needed` is exact. If the workspace
    // was never measured, `needed` is only a lower bound, and `likely` is an estimate.
    Bytes likely = 0;
    std::string who;
};

// Run `step`. Return the `OutOfBudgetError` that `step` threw, or none if it succeeded.
template <class Step>
std::optional<OutOfBudgetError> out_of_budget_of(Step&& step) {
    try {
        step();
        return {};
    } catch (const OutOfBudgetError& error) {
        return error;
    }
}

// The device is out of memory, and nothing is left to evict. `said` is the allocator's message.
struct DeviceOutOfMemoryError final : Error {
    explicit DeviceOutOfMemoryError(std::string what)
        : Error("out of memory: the device has no more"), said(std::move(what)) {}

    [[noreturn]] void raise(Session& session) const override;

    std::string said;
};

// The budget was opened without `device=`, and the program uses another device than the one that
// Rekindle assumed.
struct WrongDeviceError final : Error {
    explicit WrongDeviceError(c10::Device where)
        : Error("the program uses another device than the budget"), found(where) {}

    [[noreturn]] void raise(Session& session) const override;

    c10::Device found;
};

// The program needs an evicted value while it captures a CUDA graph, where values cannot be
// recomputed.
struct RecomputeDuringCaptureError final : Error {
    explicit RecomputeDuringCaptureError(const char* maker)
        : Error("an evicted value was asked for while a graph was captured"), site(maker) {}

    [[noreturn]] void raise(Session& session) const override;

    const char* site;
};

// The runtime refuses an operator (R11, refuse loudly). Either the operator is a collective that
// may write unknown memory. Or a dispatch mode or tensor subclass handles it after the runtime's
// dispatch key.
struct UnsupportedOperatorError final : Error {
    explicit UnsupportedOperatorError(const Facts& op, bool in_python = false)
        : Error("an operator is refused within a budget"), facts(&op), by_python(in_python) {}

    [[noreturn]] void raise(Session& session) const override;

    const Facts* facts;
    bool by_python;
};

// An operator made `now` bytes when it was recomputed, but `before` bytes when it first ran.
struct ChangedSizeError final : Error {
    ChangedSizeError(const Facts* op, Bytes made, Bytes once)
        : Error("an operator made more or less when it ran again"),
          facts(op),
          now(made),
          before(once) {}

    [[noreturn]] void raise(Session& session) const override;

    const Facts* facts;
    Bytes now;
    Bytes before;
};

// A tensor that a recomputation reads has `now` bytes, but had `before` bytes at the first run.
struct ResizedInputError final : Error {
    ResizedInputError(Bytes there, Bytes once)
        : Error("a tensor was resized that a value is computed from"), now(there), before(once) {}

    [[noreturn]] void raise(Session& session) const override;

    Bytes now;
    Bytes before;
};

// A recomputation needs a parameter of `nbytes` that FSDP freed. FSDP has not gathered the
// parameter again, or has gathered it with other contents (`changed`).
struct GatheredInputError final : Error {
    GatheredInputError(Bytes size, bool others)
        : Error("a parameter that a value is computed from is not back"),
          nbytes(size),
          changed(others) {}

    [[noreturn]] void raise(Session& session) const override;

    Bytes nbytes;
    bool changed;
};

// A tensor that a recomputation reads was modified in place since the first run of the operator.
// The runtime did not see the write, but the tensor's version counter differs.
struct ModifiedInputError final : Error {
    ModifiedInputError(const char* maker, std::int64_t is, std::int64_t was)
        : Error("a tensor was modified that a value is computed from"),
          site(maker),
          now(is),
          expected(was) {}

    [[noreturn]] void raise(Session& session) const override;

    const char* site;
    std::int64_t now;
    std::int64_t expected;
};

// Code outside PyTorch modified a tensor that a recomputation reads, after the operator's first
// run.
struct ExternalWriteError final : Error {
    explicit ExternalWriteError(const char* maker)
        : Error("memory that a value is computed from was written outside PyTorch"), site(maker) {}

    [[noreturn]] void raise(Session& session) const override;

    const char* site;
};

// The host copy of a value could not be read, and the value cannot be recomputed.
struct SwapReadError final : Error {
    explicit SwapReadError(std::string maker)
        : Error("a value that was swapped out could not be read back"), site(std::move(maker)) {}

    [[noreturn]] void raise(Session& session) const override;

    std::string site;
};

// The program reads a value that had no room, and that cannot be computed any more, because a
// tensor that it needs was overwritten.
struct LostValueError final : Error {
    LostValueError(const char* maker, Bytes size)
        : Error("a value that was never computed cannot be any more"), site(maker), nbytes(size) {}

    [[noreturn]] void raise(Session& session) const override;

    const char* site;
    Bytes nbytes;
};

// A tensor that an operator reads is not in memory when the operator runs. This is a defect of the
// native core.
struct MissingInputError final : Error {
    MissingInputError() : Error("a value that should be in memory is not; please report this") {}

    [[noreturn]] void raise(Session& session) const override;
};

}  // namespace rekindle
