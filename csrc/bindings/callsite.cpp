#include "callsite.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <array>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings.h"
#include "frames.h"

namespace nb = nanobind;

namespace dure {

namespace {

constexpr size_t kMostSites = 65536;  // beyond, a program makes up code as it runs
constexpr size_t kMostText = 159;     // as much as the shared segment shows

// Beginnings of paths, and whether files there are the library's: the first that a path has decides
// (dure/trace/frames.py).
using Folders = std::vector<std::pair<std::string, bool>>;

Folders& folders() {
    static Folders known;
    return known;
}

bool is_library(const std::string& file) {
    for (const auto& [beginning, library] : folders()) {
        if (file.starts_with(beginning)) return library;
    }
    return false;
}

std::string text_of(PyObject* unicode) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(unicode, &size);
    if (!text) PyErr_Clear();
    return text ? std::string(text, static_cast<size_t>(size)) : std::string("?");
}

struct PlaceHash {
    size_t operator()(const Place& p) const {
        return std::hash<const void*>()(p.code) ^
               static_cast<size_t>(p.offset) * 0x9E3779B97F4A7C15;
    }
};

// Whether a code object is the library's, remembered. Slots hold references, so that a code object
// is never taken for another one at the same address.
bool is_library(PyCodeObject* code) {
    struct Known {
        PyCodeObject* code = nullptr;
        bool library = false;
    };
    static std::array<Known, 256> known;
    Known& k = known[std::hash<const void*>()(code) / 64 % known.size()];
    if (k.code != code) {
        const bool library = is_library(text_of(code->co_filename));
        Py_INCREF(code);
        Py_XDECREF(k.code);
        k = {code, library};
    }
    return k.library;
}

Site describe(const Place& place) {
    Site site;
    site.file = text_of(place.code->co_filename);
    site.function = text_of(place.code->co_qualname);
    site.line = PyCode_Addr2Line(place.code, place.offset);
    const std::string line = std::string(":").append(std::to_string(site.line));
    const size_t room = kMostText - line.size();
    // Of a long path the end tells more.
    size_t from = 0;
    if (site.file.size() > room) {
        from = site.file.size() - room + 3;
        while (from < site.file.size() && (site.file[from] & 0xC0) == 0x80) from++;  // UTF-8
        site.text.append("...");
    }
    site.text.append(site.file, from);
    site.text += line;
    const std::string in = std::string(" in ").append(site.function);
    if (site.text.size() + in.size() <= kMostText) site.text += in;
    return site;
}

const Site* known_site(const Place& place) {
    struct Recent {
        Place place;
        const Site* site = nullptr;
    };
    static std::unordered_map<Place, Site, PlaceHash> sites;  // entries never move
    static std::array<Recent, 64> recent;                     // a loop has several calls
    Recent& r = recent[(PlaceHash()(place) >> 4) % recent.size()];
    if (r.site && place == r.place) return r.site;
    auto found = sites.find(place);
    if (found == sites.end()) {
        static const Site too_many{"(one of many generated places)", "?", "?", 0};
        if (sites.size() >= kMostSites) return &too_many;
        Py_INCREF(place.code);
        found = sites.emplace(place, describe(place)).first;
    }
    r = {place, &found->second};
    return r.site;
}

}  // namespace

const Site* call_site() {
    static const Site nowhere{"(no Python frame)", "?", "?", 0};
    Place place;
    for (Frames frames; frames; frames.next()) {
        place = frames.place();
        if (!is_library(place.code)) break;
    }
    return place.code ? known_site(place) : &nowhere;
}

namespace {

constexpr char kRankThread[] = "dure-rank-";  // a rank's main thread in dure.testing

std::string name_of_this_thread() {
    try {
        const auto threading = nb::module_::import_("threading");
        const nb::object self = threading.attr("_active").attr("get")(PyThread_get_thread_ident());
        if (self.is(threading.attr("main_thread")())) return "";
        if (!self.is_none()) {
            auto name = nb::cast<std::string>(self.attr("name"));
            return name.starts_with(kRankThread) ? "" : name;
        }
    } catch (const std::exception&) {  // a name is a favour
    }
    char name[16] = {};  // of autograd's threads, and other libraries'
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

}  // namespace

const std::string* thread_name() {
    static thread_local bool known = false;
    static thread_local const std::string* name = nullptr;
    if (!known) {
        static std::unordered_set<std::string> names;  // entries never move
        std::string text = name_of_this_thread();
        if (!text.empty()) name = &*names.insert(std::move(text)).first;
        known = true;
    }
    return name;
}

namespace {

thread_local Subject said;

Subject make_subject(uint32_t code, std::string text) {
    static std::unordered_set<std::string> texts;  // entries never move
    static const std::string too_many = "(one of many)";
    if (texts.size() >= kMostSites) return {code, &too_many};
    return {code, &*texts.insert(std::move(text)).first};
}

}  // namespace

Subject thread_subject() { return said; }

void bind_callsite(nb::module_& m) {
    nb::class_<Subject>(m, "Subject")
        .def("__init__",
             [](Subject* made, uint32_t code, std::string text) {
                 new (made) Subject(make_subject(code, std::move(text)));
             })
        .def_ro("code", &Subject::code)
        .def_prop_ro("text", [](const Subject& s) { return s.text ? *s.text : std::string(); });
    m.def("set_subject", [](const Subject& about) { said = about; });
    m.def("subject", [] { return said; });
    m.def("set_library_folders", [](Folders found) { folders() = std::move(found); });
    m.def("call_site", [] { return call_site()->text; });
}

}  // namespace dure
