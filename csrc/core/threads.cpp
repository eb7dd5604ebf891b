// Threads of a rank that call on one channel without an order.
//
// Note "Crossing threads". Ranks match calls by their order on a channel. If two threads call
// without an order between them, the first thread of one rank can meet the second one of another
// rank; operation and length are often the same, so the fingerprints do not show it. What shows it
// is what the threads of one rank do:
//
// 1. A second thread calls while the first one is inside a synchronous call: there is no order. The
//    second call is refused (engine.h), and the rank says so in the segment: a *crossing*. The call
//    that the first thread is in ends, on all ranks, with its result, unless it has met a thread
//    of another name (a rank's main thread is known as such), or the one that was refused. After
//    it, the group is broken for all ranks: some rank's call is missing, so nothing that follows is
//    known to belong together.
// 2. A thread calls while another one waits for an operation that it has started itself: an
//    *overlap*. There may be an order, since the first thread may have told the second one between
//    its start and its wait. From then on the ranks compare the names of the calling threads, and
//    calls of threads with different names end as a desync.
//
// What costs time is done only after one of the two: before, a call reads one word more, in the
// line that says whether the group is broken.
#include <algorithm>
#include <cstring>

#include "channel.h"

namespace dure {

namespace {

template <size_t kBytes>
void store_chars(char (&to)[kBytes], const std::string& text) {
    const size_t n = whole_characters(text, kBytes - 1);
    std::memcpy(to, text.data(), n);
    to[n] = 0;
}

}  // namespace

void Group::note_overlap(int channel) {
    header().abort_record.threads.fetch_or(kOverlaps << channel);
}

// The first one counts. A writer that dies before it has set the bit is lost to its peers anyway.
void Group::note_crossing(int channel, uint32_t number, const std::string& second,
                          const std::string& text) {
    Crossing& c = header().crossing;
    if (c.claimed.exchange(1) != 0) return;
    c.rank = rank_;
    c.channel = channel;
    c.number = number;
    store_chars(c.second, second);
    store_chars(c.text, text);
    header().abort_record.threads.fetch_or(kCrossed);
}

Status Group::abort_crossing() {
    const Crossing& c = header().crossing;
    Outcome out;
    out.status = Status::crossed;
    out.channel = c.channel;
    out.peer = c.rank;
    out.detail = c.text;
    return abort(std::move(out));
}

// Whether call `number` of this channel comes after the one that the crossing leaves whole.
bool Channel::ends_by_crossing(uint32_t number) const {
    const Crossing& c = group_.header().crossing;
    return (group_.threads_seen() & kCrossed) != 0 && c.channel == index_ &&
           static_cast<int32_t>(number - c.number) > 0;
}

// After the header exchange: whether the threads that have met belong together, as far as it is
// known.
Status Channel::check_threads() {
    const uint32_t seen = group_.threads_seen();
    const size_t now = seq_ & 1;
    std::vector<std::string> names;
    for (int r = 0; r < size_; r++) names.push_back(thread_of(r, now));
    const Crossing& c = group_.header().crossing;
    if ((seen & kCrossed) != 0 && c.channel == index_) {
        const std::string& first = names[static_cast<size_t>(c.rank)];
        const bool belong = std::all_of(names.begin(), names.end(), [&](const auto& n) {
            return n == first || (n != c.second && (n.empty() || first.empty()));
        });
        if (!belong) return group_.abort_crossing();
    }
    if ((seen & kOverlaps << index_) != 0 &&
        std::any_of(names.begin(), names.end(), [&](const auto& n) { return n != names[0]; })) {
        return report_desync();
    }
    return Status::ok;
}

}  // namespace dure
