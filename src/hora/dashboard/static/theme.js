// Before anything is drawn: the theme that was chosen here, else what the system prefers.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("hora-theme"); } catch { /* no storage: the system decides */ }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
