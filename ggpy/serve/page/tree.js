// A conversation as a tree of messages: an edited question and a second answer are siblings.
// Pure functions over records {id, parent, created}; knows neither storage nor the page.

function byAge(a, b) {
  return a.created - b.created || (a.id < b.id ? -1 : 1);
}

/** Parent's id (null for the beginning) -> its children, oldest first. */
export function childrenOf(messages) {
  const children = new Map();
  const known = new Set(messages.map((message) => message.id));
  for (const message of [...messages].sort(byAge)) {
    const parent = known.has(message.parent) ? message.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(message);
  }
  return children;
}

/** The messages from the beginning to `leaf`, which is included. */
export function pathTo(messages, leaf) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const path = [];
  const seen = new Set(); // an imported file may have a circle
  for (let m = byId.get(leaf); m && !seen.has(m.id); m = byId.get(m.parent)) {
    seen.add(m.id);
    path.unshift(m);
  }
  return path;
}

/** The end of the newest branch below a message, or below the beginning (null). */
export function leafBelow(messages, id) {
  const children = childrenOf(messages);
  const seen = new Set();
  let leaf = id;
  while (children.has(leaf) && !seen.has(leaf)) {
    seen.add(leaf);
    leaf = children.get(leaf).at(-1).id;
  }
  return leaf;
}

/** A function of a message: those that stand in the same place, itself included, oldest first. */
export function siblingsOf(messages) {
  const groups = new Map();
  for (const group of childrenOf(messages).values()) for (const m of group) groups.set(m.id, group);
  return (message) => groups.get(message.id) ?? [message];
}
