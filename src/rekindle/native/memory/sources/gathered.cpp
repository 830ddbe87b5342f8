#include "gathered.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../../torch/fingerprint.h"

namespace rekindle {

namespace {

// Scope in which storages are locked in the engine, so that they stay in memory. The destructor
// unlocks them, also after an error.
class LockedStorages final {
public:
    explicit LockedStorages(Engine& engine) : engine_(engine) {}

    LockedStorages(const LockedStorages&) = delete;
    LockedStorages& operator=(const LockedStorages&) = delete;

    ~LockedStorages() {
        for (const Ref<Storage>& each : storages_) {
            engine_.unlock(*each);
        }
    }

    void lock(Storage& storage) {
        storages_.emplace_back(&storage);
        engine_.lock(storage);
    }

private:
    Engine& engine_;
    std::vector<Ref<Storage>> storages_;
};

// Return the user-held values, oldest first, that are computed from `source`, directly or through
// values that are not user-held. Values computed from the returned ones do not need `source`.
std::vector<Ref<Storage>> held_dependents(Engine& engine, Storage& source) {
    std::vector<Ref<Storage>> found;
    std::vector<Storage*> stack{&source};
    const std::uint64_t mark = engine.graph.new_mark();
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

// Return true if a recomputation of the evicted `storage` would read a parameter that FSDP has
// freed and not gathered again.
bool needs_absent(Engine& engine, Storage& storage) {
    bool found = false;
    std::vector<Storage*> stack{&storage};
    const std::uint64_t mark = engine.graph.new_mark();
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

// Drop the recipe of `record`, so that its value stays in memory. The other results of the same
// operator calls lose their recipes too, so first make sure that these are in memory.
void GatheredParameters::drop_recipe_with_siblings(StorageRecord& record) {
    std::vector<Ref<Storage>> results;
    each_maker(record, [&](const Call& call) {
        for (const Value* value : call.outputs()) {
            results.emplace_back(value->storage);
        }
    });
    LockedStorages locked(engine_);
    for (const Ref<Storage>& each : results) {
        if (each->listed && (each->consumed() || !each->dead())) {
            room_.bring([&] { engine_.require(each->root); });
            locked.lock(*each);
        }
    }
    if (record.listed && record.resident && record.replayable) {
        room_.seal(record);
    }
}

bool GatheredParameters::leave(StorageRecord& record, std::int64_t newest) {
    if (record.absent) {
        return true;  // FSDP has freed this parameter before, and nothing was computed from it
                      // since.
    }
    frees_.process_pending();
    frees_.poll();
    const std::vector<Ref<Storage>> held = held_dependents(engine_, record);
    if (std::ranges::any_of(held, [&](const Ref<Storage>& each) {
            return may_be_newer(record_of(*each), newest);
        })) {
        return false;
    }
    for (const Ref<Storage>& each : held) {
        if (each->listed) {
            drop_recipe_with_siblings(record_of(*each));
        }
    }
    if (record.consumed()) {
        record.special.make_gathered({record.size, fingerprint_of(record.at())});
        record.absent = true;
        any_ = true;
    }
    return true;
}

void GatheredParameters::detach_from(StorageRecord& source) {
    if (!any_) {
        return;
    }
    std::vector<Storage*> made;
    engine_.graph.made_through(source, made);
    if (std::ranges::none_of(made, [&](Storage* each) {
            return !each->resident && !each->dead() && needs_absent(engine_, *each);
        })) {
        return;
    }
    std::vector<Ref<Storage>> direct;
    each_child(source, [&](Storage& child) { direct.emplace_back(&child); });
    for (const Ref<Storage>& each : direct) {
        if (each->listed) {
            drop_recipe_with_siblings(record_of(*each));
        }
    }
}

}  // namespace rekindle
