#include "arena.h"

#include <iterator>

namespace dure {

uint64_t Arena::find(const std::byte* data, size_t bytes,
                     std::shared_ptr<SharedBlock>* block) const {
    if (empty()) return 0;
    std::lock_guard hold(lock_);
    auto after = blocks_.upper_bound(data);
    if (after == blocks_.begin()) return 0;
    auto it = std::prev(after);
    std::shared_ptr<SharedBlock> found = it->second.lock();
    if (!found) {
        blocks_.erase(it);
        count_ = blocks_.size();
        return 0;
    }
    auto offset = static_cast<size_t>(data - found->data());
    if (offset + bytes > found->bytes) return 0;
    if (block) *block = found;
    return (uint64_t{found->id} << 40) | offset;
}

void Arena::add(const std::shared_ptr<SharedBlock>& block) {
    std::lock_guard hold(lock_);
    std::erase_if(blocks_, [](const auto& entry) { return entry.second.expired(); });
    blocks_[block->data()] = block;
    count_ = blocks_.size();
}

}  // namespace dure
