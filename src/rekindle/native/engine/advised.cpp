#include "advised.h"

namespace rekindle {

void AdvisedChooser::mark(Storage& storage) {
    storage.standing.marked = age_;
    if (storage.order >= 0) {
        make_ready(storage);
    }
}

void AdvisedChooser::unmark(Storage& storage) {
    storage.standing.marked = 0;
    unready(storage);
}

void AdvisedChooser::clear(Nanoseconds now) {
    if (behind_) {
        chooser_->catch_up(now);
        behind_ = false;
    }
    ++age_;
    for (Storage* storage : ready_) {
        if (storage != nullptr) {
            storage->standing.ready_at = 0;
        }
    }
    ready_.clear();
    first_ready_ = n_ready_ = 0;
    spare_ = 0;
}

Bytes AdvisedChooser::spare_beside(std::span<const Edge> inputs, std::uint64_t mark) const {
    Bytes spare = spare_;
    for (const Edge& edge : inputs) {
        Storage& storage = *edge.value->storage;
        if (storage.standing.ready_at != 0 && storage.mark != mark) {
            storage.mark = mark;
            spare -= storage.nbytes;
        }
    }
    return spare;
}

void AdvisedChooser::make_ready(Storage& storage) {
    if (storage.standing.ready_at == 0) {
        remove_null_entries();
        ready_.push_back(&storage);
        storage.standing.ready_at = static_cast<std::uint32_t>(ready_.size());
        ++n_ready_;
        spare_ += storage.nbytes;
    }
}

void AdvisedChooser::unready(Storage& storage) noexcept {
    if (storage.standing.ready_at != 0) {
        ready_[storage.standing.ready_at - 1] = nullptr;
        storage.standing.ready_at = 0;
        --n_ready_;
        spare_ -= storage.nbytes;
    }
}

// Remove the null entries of `ready_`, the list of marked storages, once they outnumber its
// storages. So the list does not grow with each mark.
void AdvisedChooser::remove_null_entries() {
    if (ready_.size() < 2 * n_ready_ + 16) {
        return;
    }
    std::erase(ready_, nullptr);
    for (std::size_t i = 0; i < ready_.size(); ++i) {
        ready_[i]->standing.ready_at = static_cast<std::uint32_t>(i + 1);
    }
    first_ready_ = 0;
}

void AdvisedChooser::add(Storage& storage) {
    chooser_->add(storage);
    if (storage.standing.marked == age_) {
        make_ready(storage);
    }
}

void AdvisedChooser::remove(Storage& storage) {
    chooser_->remove(storage);
    unready(storage);
}

Storage* AdvisedChooser::choose(Nanoseconds now) {
    if (n_ready_ == 0) {
        return chooser_->choose(now);
    }
    behind_ = true;
    while (ready_[first_ready_] == nullptr) {
        ++first_ready_;
    }
    return ready_[first_ready_];
}

void AdvisedChooser::disposed(Storage& storage) noexcept {
    unready(storage);
    chooser_->disposed(storage);
}

}  // namespace rekindle
