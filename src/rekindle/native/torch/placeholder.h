// Placeholders: storages without memory whose use raises an error. A placeholder replaces memory
// that was evicted while the program's variables hold it. Twin of
// rekindle.pytorch.held._placeholders.
//
// Tensors and views refer to the storage object and not to its memory, so they stay valid. The
// storage keeps its size, so that views can still be made. The runtime must restore the memory
// before the tensor is read or written.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace rekindle {

// Return true if this version of torch supports placeholders: storages without memory whose use
// raises.
bool can_make_placeholders() noexcept;
// Make `storage_impl` a placeholder: its use raises from then on. Return another storage that owns
// its memory.
c10::intrusive_ptr<c10::StorageImpl> make_placeholder(c10::StorageImpl& storage_impl);
// Move the memory of `from` into the placeholder `storage_impl`, which is then usable again.
void restore_into(c10::StorageImpl& storage_impl, c10::StorageImpl& from);
// Return true if `storage_impl` is a placeholder.
bool is_placeholder(const c10::StorageImpl& storage_impl) noexcept;
// If `storage_impl` is a placeholder, let code read it without an error, as memory at a null
// address. Return false if it is no placeholder.
bool allow_reading(c10::StorageImpl& storage_impl);
// Undo `allow_reading`: let reads of `storage_impl` raise again, unless it is not a placeholder any
// more.
void refuse_reading(c10::StorageImpl& storage_impl);
// From now on, placeholders name the fork in the error of an access, once `refuse_reading` was
// called. fork() has just made this process.
void name_fork_in_errors() noexcept;
// Return the unique key of the placeholder that owns `data`; null if `data` is not a placeholder's.
const void* placeholder_id(const c10::DataPtr& data) noexcept;

}  // namespace rekindle
