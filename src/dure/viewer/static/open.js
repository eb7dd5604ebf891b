// The first page: gives the token, which stands behind the # of the address, for the cookie.
"use strict";

function say(text, more) {
  document.getElementById("say").textContent = text;
  document.getElementById("more").textContent = more;
}

async function open() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", "/");
  if (!token) {
    say("This address is incomplete.", "Open the one that dure has printed, with what stands behind the #.");
    return;
  }
  const answer = await fetch("session", { method: "POST", body: token, cache: "no-store" });
  if (answer.ok) {
    location.replace((await answer.json()).path);
  } else {
    say("This address has been used.", "It opens the page once, in one browser. Was it not you? "
      + "Somebody who could read your terminal has opened it: end the run, or dure view, and start it again.");
  }
}

open().catch(() => say("Nobody answers.", "The run, or dure view, has ended."));
