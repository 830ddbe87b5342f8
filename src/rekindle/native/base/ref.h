// Counted pointers for what one engine's events make and lets die. The counts are plain integers:
// whoever guards the engine guards them.
//
// What nobody refers to any more is not destroyed at once but put into a graveyard, a list through
// the dead themselves, so that chains of thousands die without recursion and plain pointers stay
// good until the graveyard is emptied (at the end of an event).
#pragma once

#include <cstdint>
#include <utility>

#include "assert.h"

namespace rekindle {

template <class T>
class Graveyard;

// The base of what is counted. Begins with no reference, which is not yet death.
template <class T>
struct Counted {
    explicit Counted(Graveyard<T>& home) : graveyard(&home) {}

    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    Counted(Counted&&) = delete;
    Counted& operator=(Counted&&) = delete;

    union {
        Graveyard<T>* graveyard;  // while it lives
        T* next_dead;             // afterwards
    };

    std::uint32_t count = 0;

protected:
    ~Counted() = default;
};

template <class T>
class Graveyard {
public:
    void bury(T& dead) noexcept {
        dead.next_dead = first_;
        first_ = &dead;
    }

    // Some dead one; null: none is left.
    T* take() noexcept {
        T* found = first_;
        if (found != nullptr) {
            first_ = found->next_dead;
        }
        return found;
    }

private:
    T* first_ = nullptr;
};

// One reference more, one less; `Ref` pairs them.
template <class T>
void hold(T& object) noexcept {
    ++object.count;
}

template <class T>
void let(T& object) noexcept {
    REKINDLE_ASSERT(object.count > 0);
    if (--object.count == 0) {
        object.graveyard->bury(object);
    }
}

template <class T>
class Ref {
public:
    Ref() = default;

    explicit Ref(T* object) noexcept : object_(object) {
        if (object_ != nullptr) {
            hold(*object_);
        }
    }

    Ref(const Ref& other) noexcept : Ref(other.object_) {}

    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}

    Ref& operator=(const Ref& other) noexcept {
        Ref copy(other);
        std::swap(object_, copy.object_);
        return *this;
    }

    Ref& operator=(Ref&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }

    ~Ref() {
        if (object_ != nullptr) {
            let(*object_);
        }
    }

    T* get() const noexcept { return object_; }

    T* operator->() const noexcept { return object_; }

    T& operator*() const noexcept { return *object_; }

    explicit operator bool() const noexcept { return object_ != nullptr; }

private:
    T* object_ = nullptr;
};

}  // namespace rekindle
