// Makes a cookie of the key in the address's fragment, or of one that is typed.
const why = document.getElementById("why");
const form = document.getElementById("form");

async function enter(key) {
  why.textContent = "Signing in…";
  const answer = await fetch("/session", { method: "POST", body: key, credentials: "same-origin" });
  if (answer.ok) {
    location.replace(location.pathname + location.search);
    return;
  }
  why.textContent = answer.status === 401
    ? "That is not the key of this dashboard. `atoll dashboard` prints the address with it when it starts."
    : `Sign-in failed: ${await answer.text()}`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  enter(document.getElementById("key").value.trim());
});

function fromFragment() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {
    history.replaceState(null, "", location.pathname + location.search);
    enter(key);
  }
}
addEventListener("hashchange", fromFragment);
fromFragment();
