import "./style.css";
import { startReport } from "./report";

const text = document.getElementById("payload")?.textContent;
const main = document.getElementById("main");
if (text && main && document.body.dataset.page === "report") startReport(main, text);
