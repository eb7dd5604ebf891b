// Copies of user data.
//
// Note "Streaming". A plain copy first reads the lines it is about to overwrite, and leaves them in
// the cache in place of others. Where a result is so large that its beginning is gone from the
// cache before anyone reads it, both are waste: non-temporal stores write whole lines past the
// cache. They lose where the lines are in the cache already, or will be read soon; so staging
// buffers and tensors that are reduced in place are never streamed into.
//
// Note "Side by side". What the processor reads ahead by itself ends with the page. So long copies
// take several pages at a time, some lines of each in turn, and ask for those of the next pages
// meanwhile: more lines are under way from another core's cache, or from memory, at once.
#pragma once

#include <cstddef>

namespace dure {

// Whether `bytes` are more than this machine's last cache holds.
bool exceeds_cache(size_t bytes);

// Copy with non-temporal stores where the machine has them; complete for other ranks at the
// caller's next release, as any copy. The ranges do not overlap.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

constexpr size_t kSideBySide = 4;  // pages

// As `stream_copy`, of many ranges, pages of which are copied side by side; complete after
// `finish`.
class StreamedRanges {
  public:
    void add(std::byte* to, const std::byte* from, size_t bytes);
    void finish();

  private:
    void copy_pages();

    std::byte* to_[kSideBySide];
    const std::byte* from_[kSideBySide];
    size_t pages_ = 0;  // that wait to be copied
};

// Copy a range that no core's cache holds, the way that was the quicker one of this process's first
// such copies: streamed, or as the C library does it. Processors differ by 2 in either direction.
void large_copy(std::byte* to, const std::byte* from, size_t bytes);

constexpr size_t kLargeCopyBytes = 4 * 1024 * 1024;  // from here on it is worth to find out

// Copy what is not in this core's cache. `more` bytes behind it will be copied next. The ranges do
// not overlap.
void fetch_copy(std::byte* to, const std::byte* from, size_t bytes, size_t more = 0);

}  // namespace dure
