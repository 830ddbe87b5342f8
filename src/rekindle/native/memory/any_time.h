// What variables of the program hold is let go like everything else (`evict="anything"`).
//
// What the program holds are tensors, views and storages that share one storage. That storage is
// emptied: its memory is exchanged for none, so that the tensors stay what and where they are, and
// reading one raises. Whoever is about to read says so before; then what was there is computed
// again and put back. What has lengths and indices stays: functions that are composed of operators
// (`tensor_split`, `pad_packed_sequence`) read it before any of them runs.
//
// The core's lock is given back while an operator runs: what it reads is locked in the engine, and
// what autograd unpacked belongs to the node of its thread.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "driver.h"

namespace rekindle {

// What is locked in the engine, for it is being read.
using Kept = c10::SmallVector<Ref<Storage>, 6>;

// Around one driver. All of it needs the core's lock.
class AnyTime final {
public:
    explicit AnyTime(Driver& driver) : driver_(driver) {}

    AnyTime(const AnyTime&) = delete;
    AnyTime& operator=(const AnyTime&) = delete;
    AnyTime(AnyTime&&) = delete;
    AnyTime& operator=(AnyTime&&) = delete;
    ~AnyTime() = default;

    // Whether a result of an operator may be let go while the program holds it.
    static bool is_returnable(const c10::TensorImpl& tensor);

    bool open = true;    // the budget is not over
    int unrecorded = 0;  // for how many reasons what is made with grad mode off has no recipe

    bool records_without_grad() const noexcept { return open && unrecorded == 0; }

    // What is in `homes` is there, and locked: it is in `kept`. Where it fails, what is in there is
    // locked all the same.
    void bring(const Homes& homes, Kept& kept, Locked& lock);
    // The inverse: for a driver that may be none of these any more.
    static void done(Driver& driver, Kept& kept);
    // What is in `homes` is there until `unlock_there` is called with the number that this returns.
    std::int64_t lock_there(const Homes& homes, Locked& lock);
    void unlock_there(std::int64_t number);
    // An operator of the program made or wrote `record`: that too can be let go.
    void made(Record& record);
    // Autograd got `record` for the node that it is at: kernels may read it unseen.
    void stays(Record& record);

    // An operator begins that may read whatever the program holds.
    void stops() { pause(true); }

    // Something may be let go next. If there are threads of which nothing is known, it is nothing
    // that variables hold. Gives the lock back for a moment.
    void about_to_let_go(Locked& lock);
    // An operator ran. With grad mode off: whether there are too many such sources.
    void look_at_sources(Locked& lock);
    // Lets go of what only recomputation needs, once what needs it is there; whether it helped.
    bool give_up_sources();

    // Runs `step`, and if there is no room for it once more, without such sources.
    template <class Step>
    void attempt(Step&& step) {
        std::optional<Shortage> shortage = shortage_of(step);
        if (!shortage) {
            return;
        }
        if (!open || !give_up_sources()) {
            throw Shortage(*std::move(shortage));
        }
        step();
    }

    // The end, before all is back and after it.
    void close();
    void forget_recipes();

private:
    struct Worked final {
        std::thread::id thread;
        Ref<Storage> storage;
    };

    struct Unpacked final {
        std::thread::id thread;
        const void* node;
        Ref<Storage> storage;
    };

    bool may_go_now(const Record& record) const noexcept;
    void node_changes();
    void work_with(Record& record);
    static bool is_over(const Worked& worked);
    bool is_any_over() const;
    void keep_what_is_left();
    void pause(bool pause);
    bool hangs_on_too_much(Record& record) const;
    std::vector<Ref<Storage>> dead_sources();

    static constexpr int OPERATORS_BETWEEN_LOOKS = 16;

    Driver& driver_;
    std::vector<Unpacked> unpacked_;      // what autograd works with now
    std::vector<Worked> worked_with_;     // made or asked for in a backward pass going on
    std::map<std::int64_t, Kept> there_;  // what functions of one's own read that run now
    std::int64_t numbers_ = 0;
    int until_look_ = OPERATORS_BETWEEN_LOOKS;
    bool paused_ = false;
};

// What the program reads is there, and stays until `end`, or until it goes for something failed.
// Lock and driver outlive it.
class Touched final {
public:
    Touched(Driver& driver, const Homes& homes, Locked& lock);
    Touched(const Touched&) = delete;
    Touched& operator=(const Touched&) = delete;
    Touched(Touched&&) = delete;
    Touched& operator=(Touched&&) = delete;
    ~Touched();

    void end();

private:
    Driver& driver_;
    Kept kept_;
};

// Something may be let go next, perhaps what variables hold.
inline void about_to_let_go(Driver& driver, Locked& lock) {
    if (driver.any_time && driver.any_time->open) {
        driver.any_time->about_to_let_go(lock);
    }
}

}  // namespace rekindle
