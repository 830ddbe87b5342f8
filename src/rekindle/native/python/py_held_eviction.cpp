#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <memory>

#include "../memory/evict_held_last.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Add the storage of `tensor` to `storages`. For a sparse tensor, add the storages of its parts.
void add_storages(const at::Tensor& tensor, StorageList& storages) {
    if (has_memory(*tensor.unsafeGetTensorImpl())) {
        storages.push_back(tensor.storage().unsafeGetStorageImpl());
        return;
    }
    for (const at::Tensor& part : parts_of(tensor)) {
        storages.push_back(part.storage().unsafeGetStorageImpl());
    }
}

// For `evict="auto"`: restore `storages`, and register that Python code reads them, so that they
// are not evicted meanwhile. Return a number for `end_reading`.
std::int64_t begin_held_read(
    Session& session, const StorageList& storages, bool saved, Locked& lock
) {
    const std::int64_t number = session.held.begin_reading(storages, saved);
    try {
        for (const c10::StorageImpl* storage_impl : storages) {
            retry_evicting_held(session, lock, [&] { session.room.bring_back(*storage_impl); });
        }
    } catch (...) {
        session.held.end_reading(number);
        throw;
    }
    return number;
}

// From now on, evict values that the user's variables hold like all others (`evict="anything"`).
// Must be called before the budget is entered.
void evict_anything(Session& session) {
    TORCH_CHECK(
        can_make_placeholders(),
        "this torch cannot make an evicted storage raise an error when it is read"
    );
    const Locked lock;
    session.held.eviction = std::make_unique<HeldEviction>(
        session.frees, session.room, session.sources, session.history, session.in_progress
    );
    session.events.only_counting.allowed = false;
}

// Return the number of storages that are evicted although the program holds tensors in them.
std::int64_t placeholders(Session& session) {
    {
        const Locked lock;
        session.frees.process_pending();
    }
    return session.registry.placeholders;
}

// Enter (`change` = 1) or leave (-1) a scope in which values made with grad mode off get no recipe.
// Values without a recipe are not evicted.
void record_without_grad(Session& session, std::int64_t change) {
    const Locked lock;
    session.held.eviction->unrecorded += static_cast<int>(change);
}

// Restore the contents of `tensors`, and do not evict these tensors until `end_reading`. If
// `saved`, do not evict values that autograd saved either. If `writes`, the reader may write as
// well. Return a number for `end_reading`.
std::int64_t begin_reading(Session& session, PyObject* tensors, bool saved, bool writes) {
    StorageList storages;
    const Object each(PySequence_Fast(tensors, "tensors: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        PyObject* tensor = PySequence_Fast_GET_ITEM(each.get(), i);
        static_cast<void>(tensor_of(tensor));
        add_storages(THPVariable_Unpack(tensor), storages);
    }
    Locked lock;
    return session.held.eviction ? session.held.eviction->begin_reading(storages, writes, lock)
                                 : begin_held_read(session, storages, saved, lock);
}

// End the read that `begin_reading` began.
void end_reading(Session& session, std::int64_t number) {
    const Locked lock;
    if (session.held.eviction) {
        session.held.eviction->end_reading(number);
    } else {
        session.held.end_reading(number);
    }
}

// Return the sources that the program holds and that must stay in memory: for each a tensor or
// None, its bytes, the operator that made it, and the reason.
PyObject* pinned(Session& session) {
    std::vector<PinnedSource> found;
    {
        const Locked lock;
        session.frees.process_pending();
        if (session.held.eviction && session.held.eviction->moves()) {
            found = session.held.eviction->pinned();
        }
    }
    return list_of(found, [](const PinnedSource& each) {
        const at::Tensor tensor(each.tensor.lock());
        return Py_BuildValue(
            "(NLss)",
            THPVariable_Wrap(tensor),
            static_cast<long long>(each.nbytes),
            each.site,
            each.why
        );
    });
}

}  // namespace

}  // namespace functions

PyMethodDef* held_methods() {
    static std::array all{
        method<functions::evict_anything>("evict_anything"),
        method<functions::placeholders>("placeholders"),
        method<functions::record_without_grad>("record_without_grad"),
        method<functions::begin_reading>("begin_reading"),
        method<functions::end_reading>("end_reading"),
        method<functions::pinned>("pinned"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
