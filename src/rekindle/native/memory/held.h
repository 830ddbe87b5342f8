// What variables of the program hold goes as well, once nothing else is left (`evict="auto"`). (At
// any time: see `any_time.h`.)
//
// Before `OutOfBudget` would be raised, what was asked for is tried once more, and meanwhile what
// variables hold may be let go. What is read meanwhile must not: the operands of the operator that
// runs, and what rekindle.pytorch.held knows of. Only numbers that an operator made go, for nothing
// reads those but operators.
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>

#include "../base/mutex.h"
#include "../torch/geometry.h"
#include "any_time.h"
#include "driver.h"
#include "program.h"

namespace rekindle {

// Whether a result of an operator may be let go while the program holds it.
bool is_returnable(const c10::TensorImpl& tensor);
// Whether `record` may ever be let go while the program holds it.
bool may_return(const Record& record) noexcept;

// While it lives, what variables hold may be let go, but for what somebody reads. Lock and driver
// outlive it.
class LastResort final {
public:
    explicit LastResort(Driver& driver);
    LastResort(const LastResort&) = delete;
    LastResort& operator=(const LastResort&) = delete;
    LastResort(LastResort&&) = delete;
    LastResort& operator=(LastResort&&) = delete;
    ~LastResort();

    // Something that might read anything is over: lends what was lent, but for what is read.
    void go_on();

private:
    Driver& driver_;
    std::vector<Ref<Storage>> lent_;
};

// While it lives, what is in `homes` is being read. Begins and ends with the lock.
class Reading final : public Reader {
public:
    // `saved`: and all that autograd saved, perhaps.
    Reading(Driver& driver, Homes homes, bool saved = false);
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    Reading(Reading&&) = delete;
    Reading& operator=(Reading&&) = delete;
    ~Reading() override;

    void note_read(Homes& read) const override { read.append(homes_.begin(), homes_.end()); }

    bool reads_saved() const override { return saved_; }

private:
    Driver& driver_;
    const Homes homes_;
    const bool saved_;
};

// Runs `step` while what variables hold may be let go, but for what somebody reads: who runs it has
// said before what that is. Gives the lock back for a moment. False: all must stay, and it did not
// run.
template <class Step>
bool lending(Driver& driver, Locked& lock, Step&& step) {
    if (!driver.lends) {
        return false;
    }
    bool known = false;
    {
        const Unlocked others(lock);
        known = all_threads_are_known(driver);
    }
    driver.collect();
    if (!known || !driver.lends || driver.reading_anything != 0) {
        return false;
    }
    const LastResort resort(driver);
    step();
    return true;
}

// Runs `step`, and if there is no room for it once more, without the copies from which the step of
// an optimizer can be undone: they go out of the budget. Gives the lock back for that.
template <class Step>
void or_without_copies(Driver& driver, Locked& lock, Step&& step) {
    std::optional<Shortage> shortage = shortage_of(step);
    if (!shortage) {
        return;
    }
    bool moved = false;
    if (driver.tell_ranges) {  // amid such a step
        const Unlocked others(lock);
        moved = move_copies_out(driver);
    }
    if (!moved) {
        driver.collect();
        throw Shortage(*std::move(shortage));
    }
    driver.settle();
    step();
}

// Runs `step`, and if there is no room for it once more, with what variables hold.
template <class Step>
void or_lending(Driver& driver, Locked& lock, Step&& step) {
    or_without_copies(driver, lock, [&] {
        if (driver.any_time) {  // it is let go like everything else
            about_to_let_go(driver, lock);
            driver.any_time->attempt(step);
            return;
        }
        std::optional<Shortage> shortage = shortage_of(step);
        if (!shortage) {
            return;
        }
        if (!lending(driver, lock, step)) {
            throw Shortage(*std::move(shortage));
        }
    });
}

// The memory of `tensor` is there.
inline void bring_back(Driver& driver, Locked& lock, const c10::TensorImpl& tensor) {
    if (driver.husks != 0 && has_memory(tensor)) {
        c10::StorageImpl& home = *tensor.unsafe_storage().unsafeGetStorageImpl();
        if (is_husk(home)) {
            or_lending(driver, lock, [&] { driver.bring_back(home); });
        }
    }
}

// Runs `act` with the lock, for what Python asks for: it may evict, and what has died by now is
// known.
template <class F>
auto settled(Driver& driver, F&& act) {
    return in_words(driver, [&] {
        Locked lock;
        about_to_let_go(driver, lock);
        driver.settle();
        return std::forward<F>(act)(lock);
    });
}

}  // namespace rekindle
