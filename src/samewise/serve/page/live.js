// The live feed: one stream of snapshots while the page is looked at, opened again when it breaks.

import { call, events } from "./api.js";

const PATIENCE = [1, 2, 4, 8, 15]; // seconds between attempts

// `told(snapshot)` for every snapshot, `lost(message)` when there is nothing to hear for now.
export function watch(told, lost) {
  let stop = null;
  const follow = () => {
    if (document.hidden) stop?.abort(); // a page nobody looks at needs no feed, and no connection
    else if (!stop || stop.signal.aborted) {
      stop = new AbortController();
      listen(stop.signal, told, lost);
    }
  };
  document.addEventListener("visibilitychange", follow);
  follow();
}

async function listen(signal, told, lost) {
  for (let attempt = 0; !signal.aborted;) {
    try {
      for await (const snapshot of events(await call("samewise/live", { signal }))) {
        attempt = 0;
        if (snapshot.over) lost(snapshot.over);
        else told(snapshot);
      }
      if (!signal.aborted) lost("the server closed the feed");
    } catch (error) {
      if (signal.aborted) return;
      lost(error.message);
      if (error.status === 404) return;
    }
    const seconds = PATIENCE[Math.min(attempt++, PATIENCE.length - 1)];
    await new Promise((wake) => {
      setTimeout(wake, 1000 * seconds);
    });
  }
}
