/** Short names for the two things that every view does with the page. */

/**
 * The element with this id, which index.html has.
 * @param {string} id
 * @returns {any} an HTMLElement of the kind that index.html says
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no element #${id}`);
  return found;
}

/**
 * A new element with text in it. Text is never read as HTML.
 * @param {string} tag
 * @param {string} className
 * @param {string} [text]
 */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}
