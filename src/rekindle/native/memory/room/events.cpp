#include "events.h"

#include <utility>

#include "../../allocator/counting_allocator.h"

namespace rekindle {

OutOfBudgetError out_of_budget(const NoRoom& shortage, const char* who) {
    OutOfBudgetError error{shortage.needed, shortage.memory, shortage.budget, who};
    if (*who == '\0' && shortage.call) {
        const Recipe& recipe = recipe_of(*shortage.call);
        error.who = recipe.name();
        error.inside = recipe.aside ? recipe.aside->workspace : 0;
    }
    return error;
}

void Events::note_memory() {
    registry_.observers.look(engine_);
    if (only_counting.look(engine_.memory, engine_.budget) && needs_no_records()) {
        only_counting.begin(engine_.budget);
    }
}

// Return true if nothing needs records and recipes of the operators that follow.
bool Events::needs_no_records() const {
    return engine_.budget != UNLIMITED && engine_.peak <= OnlyCounting::most(engine_.budget) &&
           registry_.observers.evictions == 0 && registry_.placeholders == 0 &&
           !registry_.device.queues() && registry_.device.which().is_cpu() &&
           allocations_are_counted() && !registry_.observers.need_records() &&
           !tests.evict_before_every_op && swapper == nullptr && only_counting.allowed;
}

void Events::swap_with(const Swap& swap, _object* copies) {
    engine_.swap_with(swap);
    swapper = std::make_unique<Swapper>(engine_, registry_, copies);
}

// Run `events` of the engine within `Swapper::perform`, because swapping is on.
void Events::act_swapping(c10::function_ref<void()> events) const {
    swapper->perform(events);
}

void Events::wait_for_copies() const {
    if (swapper != nullptr) {
        swapper->wait_for_all();
    }
}

// Keep the memory of the values whose recipe was dropped, because they cannot be recomputed.
void Events::own_unrecomputable() {
    engine_.take_unrecomputable(unrecomputable_);
    for (Storage* source : unrecomputable_) {
        record_of(*source).own();
    }
    unrecomputable_.clear();
}

void Events::about_to_write(StorageRecord& record) {
    finish_swap_out(record);
    finish_swap_in(record);
    if (record.on_host && record.resident && !record.replayable) [[unlikely]] {
        perform([&] { engine_.written(record); });
    }
}

void Events::about_to_write_anything() {
    if (engine_.host == nullptr) {
        return;
    }
    std::vector<Ref<Storage>> copied;
    for (Storage* each : engine_.host->copies) {
        copied.emplace_back(each);
    }
    for (const Ref<Storage>& each : copied) {
        about_to_write(record_of(*each));
    }
}

void Events::finish_swap_out(StorageRecord& record) const {
    if (record.leaving && !registry_.device.is_capturing()) {
        swapper->finish_swap_out(record);
    }
}

}  // namespace rekindle
