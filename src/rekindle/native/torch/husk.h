// Placeholders: storages without memory whose use raises an error. A placeholder replaces memory
// that was evicted while variables of the program hold it. Twin of rekindle.pytorch.held._husk.
//
// Tensors and views refer to the storage object and not to its memory, so they stay valid. The
// storage keeps its size, so that views can still be made. The memory must be restored before the
// tensor is read or written.
#pragma once

#include <c10/core/StorageImpl.h>

namespace rekindle {

// Return true if this torch supports such storages.
bool there_are_husks() noexcept;
// Free the memory of `home` and turn it into a placeholder.
void become_husk(c10::StorageImpl& home);
// Move the memory of `from` into the placeholder `home`.
void fill_husk(c10::StorageImpl& home, c10::StorageImpl& from);
// Return true if `home` is a placeholder.
bool is_husk(const c10::StorageImpl& home) noexcept;
// Make a placeholder readable as memory at a null address. Return false if `home` is none.
bool allow_reading(c10::StorageImpl& home);
// Undo `allow_reading`, unless `home` is no placeholder any more.
void refuse_reading(c10::StorageImpl& home);
// Return the unique key of a placeholder; null if `data` is not one's.
const void* token_of(const c10::DataPtr& data) noexcept;

}  // namespace rekindle
