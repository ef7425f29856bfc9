// Runs before anything is drawn, so that a chosen theme shows no flash of the other one.
"use strict";
try {
  const theme = localStorage.getItem("ggpy.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that stores nothing shows the system's theme.
}
