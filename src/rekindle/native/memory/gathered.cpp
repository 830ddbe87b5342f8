#include "gathered.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../torch/fingerprint.h"

namespace rekindle {

namespace {

// Scope in which storages are locked in the engine, so that they stay in memory. The destructor
// unlocks them, also after an error.
class LockedStorages final {
public:
    explicit LockedStorages(Driver& driver) : driver_(driver) {}

    LockedStorages(const LockedStorages&) = delete;
    LockedStorages& operator=(const LockedStorages&) = delete;
    LockedStorages(LockedStorages&&) = delete;
    LockedStorages& operator=(LockedStorages&&) = delete;

    ~LockedStorages() {
        for (const Ref<Storage>& each : storages_) {
            driver_.engine.unlock(*each);
        }
    }

    void lock(Storage& storage) {
        storages_.emplace_back(&storage);
        driver_.engine.lock(storage);
    }

private:
    Driver& driver_;
    std::vector<Ref<Storage>> storages_;
};

// Return the user-held values, oldest first, that are computed from `source`, directly or through
// values that are not user-held. Values computed from the returned ones do not need `source`.
std::vector<Ref<Storage>> held_dependents(Driver& driver, Storage& source) {
    std::vector<Ref<Storage>> found;
    std::vector<Storage*> stack{&source};
    const std::uint64_t mark = driver.engine.graph.new_mark();
    while (!stack.empty()) {
        Storage& last = *stack.back();
        stack.pop_back();
        each_child(last, [&](Storage& child) {
            if (child.mark == mark) {
                return;
            }
            child.mark = mark;
            if (child.held) {
                found.emplace_back(&child);
            } else {
                stack.push_back(&child);
            }
        });
    }
    std::ranges::sort(found, {}, [](const Ref<Storage>& each) { return each->id; });
    return found;
}

// Return true if the autograd node that made the value of `record` may have a higher sequence
// number than `newest`, so that autograd may run it earlier.
bool may_be_newer(const StorageRecord& record, std::int64_t newest) {
    const auto tensor = record.origin.lock();
    if (!tensor) {
        return true;
    }
    const auto* meta = torch::autograd::impl::get_autograd_meta(at::Tensor(tensor));
    const torch::autograd::Node* node = meta == nullptr ? nullptr : meta->grad_fn_.get();
    return node != nullptr && std::cmp_greater(node->sequence_nr(), newest);
}

// Drop the recipe of `record`, so that its value stays in memory. The other results of the same
// operator calls lose their recipes too, so first make sure that these are in memory.
void drop_recipe_with_siblings(Driver& driver, StorageRecord& record) {
    std::vector<Ref<Storage>> results;
    each_maker(record, [&](const Call& call) {
        for (const Value* value : call.outputs()) {
            results.emplace_back(value->storage);
        }
    });
    LockedStorages locked(driver);
    for (const Ref<Storage>& each : results) {
        if (each->listed && (each->consumed() || !each->dead())) {
            driver.room.bring([&] { driver.engine.require(each->root); });
            locked.lock(*each);
        }
    }
    if (record.listed && record.resident && record.replayable) {
        driver.room.seal(record);
    }
}

// Return true if a recomputation of the evicted `storage` would read a parameter that FSDP has
// freed and not gathered again.
bool needs_absent(Driver& driver, Storage& storage) {
    bool found = false;
    std::vector<Storage*> stack{&storage};
    const std::uint64_t mark = driver.engine.graph.new_mark();
    while (!stack.empty() && !found) {
        Storage& last = *stack.back();
        stack.pop_back();
        each_parent(last, [&](Storage& parent) {
            found = found || parent.absent;
            if (!parent.resident && parent.mark != mark) {
                parent.mark = mark;
                stack.push_back(&parent);
            }
        });
    }
    return found;
}

}  // namespace

void leave(Driver& driver, StorageRecord& record, std::int64_t newest) {
    if (record.absent) {
        return;  // FSDP has freed this parameter before, and nothing was computed from it since.
    }
    driver.frees.process_pending();
    driver.frees.poll();
    const std::vector<Ref<Storage>> held = held_dependents(driver, record);
    if (std::ranges::any_of(held, [&](const Ref<Storage>& each) {
            return may_be_newer(record_of(*each), newest);
        })) {
        driver.forget(record);
        return;
    }
    for (const Ref<Storage>& each : held) {
        if (each->listed) {
            drop_recipe_with_siblings(driver, record_of(*each));
        }
    }
    if (record.consumed()) {
        record.special.make_gathered({record.size, fingerprint_of(record.at())});
        record.absent = true;
        driver.frees_parameters = true;
    }
}

bool is_back(StorageRecord& record, const StoragePtr& storage_impl) {
    const Gathered& before = *record.special.gathered();
    if (std::cmp_not_equal(storage_impl->nbytes(), before.size)) {
        return false;
    }
    if (!record.absent && !before.unwatched) {
        return true;
    }
    if (!is_same(fingerprint_of(storage_impl), before.contents)) {
        return false;
    }
    record.absent = false;
    if (record.version.expected < 0) {
        record.version.look();
    }
    return true;
}

void detach_from(Driver& driver, StorageRecord& source) {
    if (!driver.frees_parameters) {
        return;
    }
    std::vector<Storage*> made;
    driver.engine.graph.made_through(source, made);
    if (std::ranges::none_of(made, [&](Storage* each) {
            return !each->resident && !each->dead() && needs_absent(driver, *each);
        })) {
        return;
    }
    std::vector<Ref<Storage>> direct;
    each_child(source, [&](Storage& child) { direct.emplace_back(&child); });
    for (const Ref<Storage>& each : direct) {
        if (each->listed) {
            drop_recipe_with_siblings(driver, record_of(*each));
        }
    }
}

StorageRecord& settle(Driver& driver, StorageRecord& record, const c10::TensorImpl& tensor) {
    if (!record.consumed()) {
        record.special.drop_gathered();
        record.absent = false;
        return record;
    }
    if (is_back(record, storage_of(tensor))) {
        return record;
    }
    const Ref<Storage> kept(&record);
    static_cast<void>(driver.registry.take(record));
    driver.engine.resize(record, 0);
    StorageRecord& now = *driver.find_or_register(tensor);
    driver.registry.redirect(record, now);
    driver.events.perform([&] { driver.engine.drop(record); });
    return now;
}

}  // namespace rekindle
