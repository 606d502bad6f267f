// The live feed: a stream of snapshots while the page is visible, reopened when it breaks.

import { call, events } from "./api.js";

const RETRY_SECONDS = [1, 2, 4, 8, 15]; // between attempts

// Calls onSnapshot(snapshot) for every snapshot, and onLost(message) when the connection is lost.
export function watch(onSnapshot, onLost) {
  let stop = null;
  const update = () => {
    if (document.hidden) stop?.abort(); // a hidden page needs no feed
    else if (!stop || stop.signal.aborted) {
      stop = new AbortController();
      listen(stop.signal, onSnapshot, onLost);
    }
  };
  document.addEventListener("visibilitychange", update);
  update();
}

async function listen(signal, onSnapshot, onLost) {
  for (let attempt = 0; !signal.aborted;) {
    try {
      for await (const snapshot of events(await call("samewise/live", { signal }))) {
        attempt = 0;
        if (snapshot.over) onLost(snapshot.over);
        else onSnapshot(snapshot);
      }
      if (!signal.aborted) onLost("the server closed the feed");
    } catch (error) {
      if (signal.aborted) return;
      onLost(error.message);
      if (error.status === 404) return;
    }
    const seconds = RETRY_SECONDS[Math.min(attempt++, RETRY_SECONDS.length - 1)];
    await new Promise((resolve) => {
      setTimeout(resolve, 1000 * seconds);
    });
  }
}
