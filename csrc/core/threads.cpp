// Threads of a rank that call on one channel without an order.
//
// Note "Crossing threads". Ranks match calls by their order on a channel. If two threads call
// without an order between them, a call of the first thread of one rank can match a call of the
// second thread of another rank. Operation and length are often the same, so the fingerprints do
// not detect it. It is detected where a second thread calls while the first one is inside a
// synchronous call: there is no order. The second call is refused (engine.h), and the rank writes
// this into the segment: a *crossing*. The call of the first thread ends with its result on all
// ranks, unless it has matched a call of a thread with the refused one's name, or with another
// name. (A main thread has no name, and may match any except the refused one.) After it the group
// is broken on all ranks: one rank's call is missing, so later calls may not match.
//
// Asynchronous calls of several threads are not compared: there may be an order that the engine
// does not see, and names of threads differ between ranks of right programs.
//
// Work that costs time is done only after a crossing. Before, a call reads one more word, in the
// cache line that shows whether the group is broken.
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

// Only the first crossing is recorded. If the writer dies before it has set the bit, its peers see
// that it is lost.
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

// Whether call `number` of this channel comes after the last call that the crossing lets finish.
bool Channel::ends_by_crossing(uint32_t number) const {
    const Crossing& c = group_.header().crossing;
    return (group_.threads_seen() & kCrossed) != 0 && c.channel == index_ &&
           static_cast<int32_t>(number - c.number) > 0;
}

// After the header exchange: whether the threads whose calls were matched may belong together.
Status Channel::check_threads() {
    const Crossing& c = group_.header().crossing;
    if ((group_.threads_seen() & kCrossed) == 0 || c.channel != index_) return Status::ok;
    const size_t now = seq_ & 1;
    std::vector<std::string> names;
    for (int r = 0; r < size_; r++) names.push_back(thread_of(r, now));
    const std::string& first = names[static_cast<size_t>(c.rank)];
    const bool belong = std::all_of(names.begin(), names.end(), [&](const auto& n) {
        return n == first || (n != c.second && (n.empty() || first.empty()));
    });
    return belong ? Status::ok : group_.abort_crossing();
}

}  // namespace dure
