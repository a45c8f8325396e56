import "./style.css";
import { startReport } from "./report";
import { startWatch } from "./watch";

const text = document.getElementById("payload")?.textContent;
const main = document.getElementById("main");
if (text && main) {
  if (document.body.dataset.page === "report") startReport(main, text);
  else if (document.body.dataset.page === "watch") startWatch(main, text);
}
