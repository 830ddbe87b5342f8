// Storages without a recipe: those that the program brings, and those that it writes without an
// operator (R4, sources).
//
// NOTE [External writes]
//
// Scenario: an environment refills its array of observations, or a data loader its buffer. A value
// recomputed from that memory would be wrong.
//
// So the results of an operator that reads such memory get a recipe that reads a private copy of
// the memory, or no recipe. Rekindle keeps whichever is smaller, the copy or the results. A copy is
// reused while the contents stay the same. Weights are too large to copy and seldom written. Their
// checksum is noted when recipes begin to read them, and a recomputation raises if the checksum has
// changed.
//
// Two storages may share memory (memory/sources/foreign_memory.h). A write to one of them then
// changes the other, so both count as external memory. Operators that write one of them are seen:
// before, values that need the old contents of the other are recomputed too.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <vector>

#include "../../engine/engine.h"
#include "../registry/registry.h"
#include "../room/frees.h"
#include "../room/room.h"
#include "exposed.h"
#include "foreign_memory.h"
#include "gathered.h"
#include "storages.h"

namespace rekindle {

// The sources of one budget. The caller holds the session mutex.
class Sources final {
public:
    Sources(Frees& frees, Room& room, Storages& storages)
        : gathered(frees, room),
          engine_(frees.engine),
          registry_(frees.registry),
          observers_(frees.registry.observers),
          events_(frees.events),
          frees_(frees),
          room_(room),
          storages_(storages) {}

    Sources(const Sources&) = delete;
    Sources& operator=(const Sources&) = delete;
    ~Sources() = default;

    GatheredParameters gathered;

    // -- registration ---------------------------------------------------------------------------

    // Return the record of the storage of `tensor`, or null if the tensor has no memory. A storage
    // that has no record gets one. It becomes a source: a value that cannot be recomputed.
    StorageRecord* find_or_register(const c10::TensorImpl& tensor);
    // Return the record of the table entry `found`. A storage of which only the bytes were counted
    // becomes a source (a value without a recipe).
    StorageRecord& known_at(AddressEntry found, c10::StorageImpl& storage_impl);
    // Count the memory of each of `tensors` against the budget from now on, unless it is counted
    // already. Throw `OutOfBudgetError`, before any is counted, if they do not fit together.
    void register_tensors(const std::vector<const c10::TensorImpl*>& tensors);
    // Return the record of `storage_impl`, whose address leaves PyTorch. Return null if it has
    // none, and remember the storage until it gets one. written: other code may write it as well.
    StorageRecord* expose(c10::StorageImpl& storage_impl, bool written);
    // Pin the storage of `tensor`: it is never evicted.
    void keep(const c10::TensorImpl& tensor);
    // Make `tensor`, which an optimizer writes in every step, a source and pin it (R4, sources).
    // With a recipe, recomputing it would need the values of all earlier steps.
    void pin_as_constant(const c10::TensorImpl& tensor);
    // Record that `tensor`, a view, shares its version counter with other memory. After
    // `view.data = other` the view still has the counter of its base, so a bump no longer implies a
    // write to the base.
    void note_shared_version_counter(const c10::TensorImpl& tensor);
    // `tensor` has other memory than `before` now (`tensor.data = ...`).
    void note_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before);
    // Return the record that a new recipe should read instead of `record`, a parameter that FSDP
    // freed before. `tensor` is the tensor through which the recipe reads it.
    StorageRecord& settle(StorageRecord& record, const c10::TensorImpl& tensor);

    // -- writes ---------------------------------------------------------------------------------

    // Prepare for a write to `record`, a value without a recipe that other recipes read. Recompute
    // the evicted values that need its current contents, and pin them (R4, sources).
    void forget(StorageRecord& record);
    // Return the values without room that need the current contents of `record`: `forget` would
    // give them up, because they were never computed as a whole, and still do not fit.
    std::vector<Ref<Storage>> without_room_that_need(StorageRecord& record) const;
    // Recompute and pin all values whose recipes need the current contents of `tensor`, which is
    // about to be written (R4, sources). Return true if there were such values.
    bool save_what_needs(const c10::TensorImpl& tensor);
    // Protect recipes that read `storage_impl` (R4, sources). The program is about to pass the
    // address to other code, such as NumPy, which may write there without any operator.
    void mark_externally_writable(c10::StorageImpl& storage_impl);
    // Prepare for one write to `storage_impl` by code that is no operator, such as `Tensor.apply_`.
    // Recompute and pin the values whose recipes need the old contents (R4, sources).
    void about_to_write_unseen(c10::StorageImpl& storage_impl);
    // The program has raised the version of the tensors in `storage_impl`
    // (`torch.autograd.graph.increment_version`), because it wrote there without an operator, or is
    // about to. Keep the values in memory that were computed from the old contents.
    void version_raised(c10::StorageImpl& storage_impl);

    // -- storages that share memory -------------------------------------------------------------

    // Find out which other storages share memory with `storage_impl`. Each of them counts as
    // external memory from then on. Return true if there is one.
    bool share_with_overlapping(c10::StorageImpl& storage_impl);
    // Return true if another storage shares the memory of `record`.
    bool overlaps(const StorageRecord& record) const;
    // Before an operator writes `record`: recompute and pin the values whose recipes need the old
    // contents of other storages that share its memory. Return true if there were such values.
    bool save_overlapping(StorageRecord& record);
    // Make a private copy of the external memory of `record`, for recipes to read. `storage_impl`
    // keeps the copy alive until a recipe refers to it.
    StorageRecord& copy_now(StorageRecord& record, StoragePtr& storage_impl);

private:
    StorageRecord& adopt(const c10::TensorImpl& tensor, c10::StorageImpl& storage_impl);
    StorageRecord& list(
        AddressEntry counted, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
    );
    StorageRecord& new_contents_of(StorageRecord& record);
    void make_external(StorageRecord& record);
    void stays(StorageRecord& record);
    void widen(StorageRecord& record, c10::StorageImpl& storage_impl);
    std::vector<Ref<Storage>> overlapping(c10::StorageImpl& storage_impl);

    Engine& engine_;
    Registry& registry_;
    Observers& observers_;
    Events& events_;
    Frees& frees_;
    Room& room_;
    Storages& storages_;
    ForeignMemory foreign_;
    ExposedStorages exposed_;
};

// Return the record of the private copy of the external memory of `record`, if the memory has not
// changed since the copy was made, else null.
StorageRecord* copy_still(const StorageRecord& record);

}  // namespace rekindle
