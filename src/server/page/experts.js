"use strict";
// The heat map of the routed experts, from what /experts counts: a row for each layer, a column for
// each expert, coloured by how often tokens chose it, against the mean of the layer.

const kRare = [33, 102, 172], kEven = [247, 247, 247], kOften = [178, 24, 43];  // RdBu of ColorBrewer
const kMostTimes = 4;  // from this many times the mean on, or down to this part of it, colours are full
const kRefreshMilliseconds = 3000;

// The colour of an expert that was chosen `times` as often as the mean.
function heat(times) {
  const at = Math.max(-1, Math.min(1, Math.log(times) / Math.log(kMostTimes))), to = at < 0 ? kRare : kOften;
  return `rgb(${kEven.map((from, i) => Math.round(from + (to[i] - from) * Math.abs(at))).join(", ")})`;
}

function timesMean(layer, expert) {
  const sum = layer.counts.reduce((a, b) => a + b, 0);
  return sum > 0 ? layer.counts[expert] * layer.counts.length / sum : 1;
}

// A pixel for each expert, which the style enlarges.
function drawExperts(canvas, layers) {
  const rows = layers.length, columns = Math.max(...layers.map((layer) => layer.counts.length));
  canvas.width = columns;
  canvas.height = rows;
  canvas.style.height = rows * Math.max(6, Math.min(24, Math.floor(440 / rows))) + "px";
  const context = canvas.getContext("2d");
  layers.forEach((layer, row) => layer.counts.forEach((_, expert) => {
    context.fillStyle = heat(timesMean(layer, expert));
    context.fillRect(expert, row, 1, 1);
  }));
}

function drawLegend(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; ++x) {
    context.fillStyle = heat(kMostTimes ** (2 * x / (canvas.width - 1) - 1));
    context.fillRect(x, 0, 1, canvas.height);
  }
}

const percent = (share) => (100 * share).toFixed(1) + " %";

function expertsSummary(counted) {
  const rows = counted.load.reduce((a, b) => a + b, 0);
  const loads = counted.load.map((load, rank) => `rank ${rank} ${percent(rows > 0 ? load / rows : 0)}`);
  return `The last ${counted.steps} of at most ${counted.window_steps} steps, ${counted.tokens} tokens.` +
    (counted.load.length > 1 ? ` Balancedness ${counted.balancedness.toFixed(3)}: ${loads.join(", ")} of the rows.` : "") +
    (counted.gpu_share === undefined ? "" : ` ${percent(counted.gpu_share)} of the rows have their expert on the GPU.`);
}

function expertText(layer, expert) {
  const ranks = layer.ranks?.[expert] ?? [];
  const isOnWorker = ranks.length > 0 && !ranks.includes(0);  // of a backbone with a GPU, which is rank 0
  return `Layer ${layer.layer}, expert ${expert}: chosen ${layer.counts[expert]} times, ${timesMean(layer, expert).toFixed(2)} × the layer's mean` +
    (ranks.length ? `, on ${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}` : "") +
    (layer.gpu && !isOnWorker ? (layer.gpu.includes(expert) ? ", on the GPU" : ", on the CPU") : "") + ".";
}

// The panel of the dialog: open() begins to ask the server, until the dialog is closed. `read` returns
// what /experts counts, or throws.
function expertsView({dialog, map, legend, summary, at}, read) {
  let counted = null, row = 0, column = 0, timer = 0;
  const showCell = () => {
    const layer = counted?.layers[row];
    at.textContent = layer ? expertText(layer, Math.min(column, layer.counts.length - 1)) : "";
  };
  const move = (toRow, toColumn) => {
    if (!counted?.layers.length) return;
    row = Math.max(0, Math.min(counted.layers.length - 1, toRow));
    column = Math.max(0, Math.min(counted.layers[row].counts.length - 1, toColumn));
    showCell();
  };
  const refresh = async () => {
    clearTimeout(timer);
    try {
      if (!document.hidden) {
        counted = await read();
        summary.textContent = expertsSummary(counted);
        if (counted.layers.length) drawExperts(map, counted.layers);
        showCell();
      }
      map.hidden = !counted?.layers.length;
    } catch (error) {
      summary.textContent = error.message || String(error);
      map.hidden = true;
      at.textContent = "";
    }
    if (dialog.open) timer = setTimeout(refresh, kRefreshMilliseconds);
  };
  map.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect();
    move(Math.floor((event.clientY - box.top) / box.height * map.height), Math.floor((event.clientX - box.left) / box.width * map.width));
  });
  const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  map.addEventListener("keydown", (event) => {
    if (!steps[event.key]) return;
    event.preventDefault();
    move(row + steps[event.key][0], column + steps[event.key][1]);
  });
  dialog.addEventListener("close", () => clearTimeout(timer));
  drawLegend(legend);
  return {
    open() {
      dialog.showModal();
      refresh();
    },
  };
}
