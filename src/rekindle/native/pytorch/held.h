// What variables of the program hold goes as well, once nothing else is left (`evict="auto"`). Twin
// of rekindle.pytorch.held._last_resort, where the rules are. (At any time: see `any_time.h`.)
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>

#include "any_time.h"
#include "driver.h"
#include "mutex.h"
#include "python.h"

namespace rekindle {

// Whether a result of an operator may be let go while the program holds it.
bool is_returnable(const c10::TensorImpl& tensor);
// Whether `record` may ever be let go while the program holds it.
bool may_return(const Record& record) noexcept;

// While it lives, what variables hold may be let go, but for `read`. Lock and driver outlive it.
class LastResort final {
public:
    LastResort(Driver& driver, const Homes& read, bool but_saved);
    LastResort(const LastResort&) = delete;
    LastResort& operator=(const LastResort&) = delete;
    LastResort(LastResort&&) = delete;
    LastResort& operator=(LastResort&&) = delete;
    ~LastResort();

private:
    Driver& driver_;
    std::vector<Ref<Storage>> lent_;
};

// Runs `step` while what variables hold may be let go. `reads` adds to a list in what storages they
// lie that are read meanwhile. Gives the lock back for a moment. False: they must stay, and it did
// not run.
template <class Step, class Reads>
bool lending(Driver& driver, Locked& lock, Step&& step, Reads&& reads) {
    if (!driver.lends || driver.running != 0) {  // another thread's operator may read anything
        return false;
    }
    std::optional<Read> read;
    {
        const Unlocked others(lock);
        read = what_is_read(driver);
    }
    driver.collect();
    if (!read) {
        return false;
    }
    reads(read->homes);
    const LastResort resort(driver, read->homes, read->saved);
    step();
    return true;
}

// Runs `step`, and if there is no room for it once more, with what variables hold.
template <class Step, class Reads>
void or_lending(Driver& driver, Locked& lock, Step&& step, Reads&& reads) {
    if (driver.any_time) {  // it is let go like everything else
        about_to_let_go(driver, lock);
        driver.any_time->attempt(step);
        return;
    }
    std::optional<Shortage> shortage;
    try {
        step();
        return;
    } catch (const Shortage& error) {
        shortage = error;
    }
    if (!lending(driver, lock, step, reads)) {
        throw Shortage(*std::move(shortage));
    }
}

// Likewise, where nothing is read.
template <class Step>
void or_lending(Driver& driver, Locked& lock, Step&& step) {
    or_lending(driver, lock, step, [](Homes&) {});
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

}  // namespace rekindle
