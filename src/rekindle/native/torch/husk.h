// Storages without memory, whose every use raises: what takes the place of memory that was let go
// while variables of the program hold it. Twin of rekindle.pytorch.held._husk.
//
// Tensors and views refer to the storage, not to its memory, so they stay what and where they are.
// The storage keeps its size, so that views can be made; whoever reads or writes it has to have its
// memory back before.
#pragma once

#include <c10/core/StorageImpl.h>

namespace rekindle {

// Whether storages can be made to refuse to be read with this torch.
bool there_are_husks() noexcept;
// The memory of `home` is free.
void become_husk(c10::StorageImpl& home);
// What is in `from`, which has nothing then, is in `home`.
void fill_husk(c10::StorageImpl& home, c10::StorageImpl& from);
// Whether it is one.
bool is_husk(const c10::StorageImpl& home) noexcept;
// From now on it reads as memory at a null address. Returns false if it is no husk.
bool allow_reading(c10::StorageImpl& home);
// The inverse, unless it is no husk by now.
void refuse_reading(c10::StorageImpl& home);
// What is nobody else's as long as `home` is a husk; null: it is none.
const void* token_of(const c10::DataPtr& data) noexcept;

}  // namespace rekindle
