// What the core throws, in numbers. `in_words` (python.h) makes an error of Python's of it at each
// edge of the core: where PyTorch or Python called. It is a `std::exception` all the same, for
// nothing else may leave a thread of autograd's.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "../base/types.h"

namespace rekindle {

class Driver;
struct Facts;

class Error : public std::exception {
public:
    // `said`: if nobody puts it into words.
    explicit Error(const char* said) noexcept : said_(said) {}

    // Throws what the program sees.
    [[noreturn]] virtual void raise(Driver& driver) const = 0;

    const char* what() const noexcept override { return said_; }

private:
    const char* said_;
};

// There is no room: `who` needs `needed` bytes more.
struct Shortage final : Error {
    Shortage(Bytes more, Bytes there, Bytes most, std::string whose)
        : Error("out of memory: the budget has no room for what comes next"),
          needed(more),
          memory(there),
          budget(most),
          who(std::move(whose)) {}

    [[noreturn]] void raise(Driver& driver) const override;

    Bytes needed;
    Bytes memory;
    Bytes budget;
    std::string who;
};

// Runs `step`. Nothing: there was room for it.
template <class Step>
std::optional<Shortage> shortage_of(Step&& step) {
    try {
        step();
        return {};
    } catch (const Shortage& error) {
        return error;
    }
}

// The device has no more memory, and nothing is left to evict; what it said.
struct Full final : Error {
    explicit Full(std::string what)
        : Error("out of memory: the device has no more"), said(std::move(what)) {}

    [[noreturn]] void raise(Driver& driver) const override;

    std::string said;
};

// A program that nobody said is on a device is on this one.
struct Elsewhere final : Error {
    explicit Elsewhere(c10::Device where)
        : Error("the program uses another device than the budget"), met(where) {}

    [[noreturn]] void raise(Driver& driver) const override;

    c10::Device met;
};

// What one made was evicted, and is asked for while the device writes a graph.
struct InAGraph final : Error {
    explicit InAGraph(const char* maker)
        : Error("an evicted value was asked for while a graph was captured"), site(maker) {}

    [[noreturn]] void raise(Driver& driver) const override;

    const char* site;
};

// An operator is refused: a collective that may write nobody knows what, or what a dispatch mode or
// a subclass does with it where those come after the key.
struct Unseen final : Error {
    explicit Unseen(const Facts& op, bool in_python = false)
        : Error("an operator is refused within a budget"), facts(&op), by_python(in_python) {}

    [[noreturn]] void raise(Driver& driver) const override;

    const Facts* facts;
    bool by_python;
};

// A call that could be run again made so many bytes when it was, and before so many.
struct ChangedSize final : Error {
    ChangedSize(const Facts* op, Bytes made, Bytes once)
        : Error("an operator made more or less when it ran again"),
          facts(op),
          now(made),
          before(once) {}

    [[noreturn]] void raise(Driver& driver) const override;

    const Facts* facts;
    Bytes now;
    Bytes before;
};

// An input of such a call has so many bytes, and had so many.
struct ResizedInput final : Error {
    ResizedInput(Bytes there, Bytes once)
        : Error("a tensor was resized that a value is computed from"), now(there), before(once) {}

    [[noreturn]] void raise(Driver& driver) const override;

    Bytes now;
    Bytes before;
};

// What one made was written where the budget does not see it.
struct ModifiedInput final : Error {
    ModifiedInput(const char* maker, std::int64_t is, std::int64_t was)
        : Error("a tensor was modified that a value is computed from"),
          site(maker),
          now(is),
          expected(was) {}

    [[noreturn]] void raise(Driver& driver) const override;

    const char* site;
    std::int64_t now;
    std::int64_t expected;
};

// What one made was written where PyTorch does not see it.
struct ForeignInput final : Error {
    explicit ForeignInput(const char* maker)
        : Error("memory that a value is computed from was written outside PyTorch"), site(maker) {}

    [[noreturn]] void raise(Driver& driver) const override;

    const char* site;
};

// What cannot be computed again could not be read back.
struct CopyLost final : Error {
    explicit CopyLost(std::string maker)
        : Error("a value that was swapped out could not be read back"), site(std::move(maker)) {}

    [[noreturn]] void raise(Driver& driver) const override;

    std::string site;
};

// An input of a call is not there any more.
struct Died final : Error {
    Died() : Error("a value that should be in memory is not; please report this") {}

    [[noreturn]] void raise(Driver& driver) const override;
};

}  // namespace rekindle
