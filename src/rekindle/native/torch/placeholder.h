// Placeholders: storages without memory whose use raises an error. A placeholder replaces memory
// that was evicted while variables of the program hold it. Twin of
// rekindle.pytorch.held._placeholders.
//
// Tensors and views refer to the storage object and not to its memory, so they stay valid. The
// storage keeps its size, so that views can still be made. The memory must be restored before the
// tensor is read or written.
#pragma once

#include <c10/core/StorageImpl.h>

namespace rekindle {

// Return true if this torch supports such storages.
bool can_make_placeholders() noexcept;
// Free the memory of `storage_impl` and turn it into a placeholder.
void make_placeholder(c10::StorageImpl& storage_impl);
// Move the memory of `from` into the placeholder `storage_impl`.
void restore_into(c10::StorageImpl& storage_impl, c10::StorageImpl& from);
// Return true if `storage_impl` is a placeholder.
bool is_placeholder(const c10::StorageImpl& storage_impl) noexcept;
// Make a placeholder readable as memory at a null address. Return false if `storage_impl` is none.
bool allow_reading(c10::StorageImpl& storage_impl);
// Undo `allow_reading`, unless `storage_impl` is no placeholder any more.
void refuse_reading(c10::StorageImpl& storage_impl);
// Return the unique key of a placeholder; null if `data` is not one's.
const void* placeholder_id(const c10::DataPtr& data) noexcept;

}  // namespace rekindle
