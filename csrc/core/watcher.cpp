// See the note "Watcher" in watcher.h.
#include "watcher.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "process.h"
#include "quiet_thread.h"
#include "symmetric_heap.h"
#include "types.h"

namespace dure {

namespace {

constexpr int64_t kForeverNs = 3600'000'000'000;

// Holds the page's `life` for the calling thread; the kernel reads the list at the thread's death.
class Robust {
  public:
    explicit Robust(ProcessPage& page) : page_(page) {
        size_t bytes = 0;
        if (syscall(SYS_get_robust_list, 0, &before_, &bytes) != 0) return;
        auto* link = reinterpret_cast<robust_list*>(&page.life_link);
        head_.list.next = &head_.list;
        head_.futex_offset = static_cast<long>(offsetof(ProcessPage, life)) -
                             static_cast<long>(offsetof(ProcessPage, life_link));
        if (syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) return;
        link->next = &head_.list;
        page.life.store(static_cast<uint32_t>(syscall(SYS_gettid)), std::memory_order_seq_cst);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        head_.list.next = link;
        held_ = true;
    }
    ~Robust() {
        if (!held_) return;
        head_.list.next = &head_.list;
        std::atomic_signal_fence(std::memory_order_seq_cst);
        page_.life.store(0, std::memory_order_seq_cst);
        syscall(SYS_set_robust_list, before_, sizeof head_);
    }
    Robust(const Robust&) = delete;
    Robust& operator=(const Robust&) = delete;

  private:
    ProcessPage& page_;
    robust_list_head head_{};
    robust_list_head* before_ = nullptr;
    bool held_ = false;
};

// The thread of this process, and what it is to tell. One for ever. `life` is held while the thread
// is started or ended, `lock` while `places` are looked at; neither while a `Where` runs, which may
// end a group, and with it the last `Watched`.
struct Watcher {
    std::mutex life, lock;
    int pid = 0;  // of the process whose watcher it is; a forked child begins anew
    std::map<uint64_t, Watched::Where> places;
    uint64_t last_place = 0;
    std::shared_ptr<std::atomic<bool>> stopping;
    std::thread* thread = nullptr;

    void begin();
    void end();
    void answer(uint32_t question);
    void work(const std::atomic<bool>& stopping);
};

Watcher& watcher() {
    static Watcher* one = new Watcher;
    return *one;
}

ProcessPage& own_page() { return SymmetricHeap::of_process().page(); }

void Watcher::begin() {
    stopping = std::make_shared<std::atomic<bool>>(false);
    try {
        thread =
            new std::thread(start_quietly([this, over = stopping] { work(*over); }, "dure-watch"));
    } catch (const std::system_error&) {
        thread = nullptr;
    }
}

void Watcher::end() {
    if (thread == nullptr) return;
    stopping->store(true, std::memory_order_seq_cst);
    own_page().asked.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(own_page().asked);
    if (thread->get_id() == std::this_thread::get_id())
        thread->detach();
    else
        thread->join();
    delete thread;
    thread = nullptr;
}

void Watcher::work(const std::atomic<bool>& over) {
    ProcessPage& page = own_page();
    Robust hold(page);
    uint32_t done = page.answered.load(std::memory_order_seq_cst);
    while (!over.load(std::memory_order_seq_cst)) {
        const uint32_t asked = page.asked.load(std::memory_order_seq_cst);
        if (asked == done) {
            futex_wait(page.asked, asked, kForeverNs);
            continue;
        }
        answer(done = asked);
    }
}

void Watcher::answer(uint32_t question) {
    ProcessPage& page = own_page();
    Watched::Where where;
    {
        std::lock_guard hold(lock);
        const auto found = places.find(page.about.load(std::memory_order_seq_cst));
        if (found != places.end()) where = found->second;
    }
    std::string text;
    try {
        if (where) text = where();
    } catch (const std::exception&) {  // no memory for a text
    }
    char bytes[kAnswerBytes] = {};
    std::memcpy(bytes, text.data(), whole_characters(text, sizeof bytes - 1));
    page.answered.store(0, std::memory_order_seq_cst);
    for (size_t i = 0; i < kAnswerBytes / 8; i++) {
        uint64_t part = 0;
        std::memcpy(&part, bytes + 8 * i, 8);
        page.answer[i].store(part, std::memory_order_seq_cst);
    }
    page.answered.store(question, std::memory_order_seq_cst);
    futex_wake_all(page.answered);
}

uint64_t add(Watched::Where where) {
    Watcher& w = watcher();
    std::lock_guard alone(w.life);
    std::lock_guard hold(w.lock);
    if (w.pid != getpid()) {
        w.pid = getpid();
        w.places.clear();
        w.thread = nullptr;  // the parent's: it does not exist here
    }
    if (w.places.empty()) w.begin();
    w.places.emplace(++w.last_place, std::move(where));
    return w.last_place;
}

}  // namespace

Watched::Watched(Where where) : place_(add(std::move(where))) {}

// While the last one waits here for the thread to end, the thread may run a `Where`, but that ends
// no `Watched`: there is none left. So it never waits for `life`.
Watched::~Watched() {
    Watcher& w = watcher();
    std::lock_guard alone(w.life);
    if (w.pid != getpid()) return;
    {
        std::lock_guard hold(w.lock);
        w.places.erase(place_);
        if (!w.places.empty()) return;
    }
    w.end();
}

}  // namespace dure
