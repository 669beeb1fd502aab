// Layout: positions of workers, servers and the hub, and the edges along which bytes move, per topology.
//
// place(plan, width) -> {height, radius, nodes: [{x, y}], servers: [{x, y, w, h}], hub, edges: [{from, to, path, both}]}
// from and to are ranks, "hub", or "server k".

const ALGORITHMS = ["ring", "star", "tree", "halving", "shared", "engine"];
const KINDS = [...ALGORITHMS, "rounds", "ps"];

// What to draw. strategy: {topology, unit, synchronous, options}, as the strategy describes itself
export function planOf(now, strategy) {
  const { topology = "", unit = "step", synchronous = true, options = {} } = strategy ?? {};
  const chosen = String(now.algorithm || options.algorithm || "").match(new RegExp(ALGORITHMS.join("|")))?.[0];
  const servers = now.servers.length;
  let kind = KINDS.includes(topology) ? topology : chosen ?? "mesh";
  if (kind === "rounds" && servers) kind = "ps";
  if (kind === "ps" && !servers) kind = "engine";
  return {
    kind, options, chosen, servers,
    num: Math.max(now.size || 0, ...now.workers.map((worker) => worker.rank + 1), 1),
    isAuto: topology === "auto",
    loose: !synchronous,
    rounds: unit === "round",
    every: options.every,
  };
}

// The length of a round that is under way at `step`, where it is a number: 4/8@100 is 4, from step 100 on 8.
export function roundLength(every, step) {
  let found = null;
  for (const part of String(every).split("/")) {
    const [length, from = "0"] = part.split("@");
    if (Number(from) <= step) found = Number(length);
  }
  return Number.isFinite(found) && found > 0 ? found : null;
}

export function place(plan, width) {
  const radius = plan.num <= 4 ? 24 : plan.num <= 8 ? 20 : plan.num <= 12 ? 17 : plan.num <= 20 ? 14 : 9;
  if (plan.kind === "ps") return withServers(plan, width, radius);
  if (plan.kind === "tree") return asTree(plan, width, radius);
  return around(plan, width, radius);
}

function around(plan, width, radius) {
  const height = Math.round(Math.min(plan.num > 8 ? 400 : 360, Math.max(270, width * (plan.num > 8 ? 0.95 : 0.72))));
  const [cx, cy] = [width / 2, height / 2];
  const reach = Math.min(width / 2 - radius - 40, height / 2 - radius - 20);
  const star = plan.kind === "star" && plan.num > 1;
  const outer = star ? plan.num - 1 : plan.num;
  const nodes = [];
  for (let rank = 0; rank < plan.num; rank += 1) {
    if (star && rank === 0) {
      nodes.push({ x: cx, y: cy, angle: -Math.PI / 2 });
      continue;
    }
    const angle = -Math.PI / 2 + (2 * Math.PI * (star ? rank - 1 : rank)) / outer;
    const far = plan.num === 1 ? 0 : reach;
    nodes.push({ x: cx + far * Math.cos(angle), y: cy + far * Math.sin(angle), angle });
  }
  const found = { height, radius, nodes, servers: [], hub: null, edges: [], cx, cy, reach };
  if (plan.num === 1) return found;
  if (plan.kind === "ring") found.edges = ringEdges(found, plan.num);
  else if (star) found.edges = nodes.slice(1).map((node, place) => line(place + 1, 0, node, nodes[0], radius, radius, true));
  else if (plan.kind === "halving") found.edges = pairs(plan.num).map(([a, b]) => line(a, b, nodes[a], nodes[b], radius, radius, true));
  else if (["shared", "engine", "rounds"].includes(plan.kind)) {
    const size = Math.max(38, Math.min(62, reach * 0.42));
    found.hub = { x: cx, y: cy, size };
    const far = ({ angle }) => (plan.kind === "shared" ? Math.min(size / Math.abs(Math.cos(angle)), (0.72 * size) / Math.abs(Math.sin(angle))) : size);
    found.edges = nodes.map((node, rank) => line(rank, "hub", node, found.hub, radius, far(node), true));
  } else found.edges = allPairs(plan.num).map(([a, b]) => line(a, b, nodes[a], nodes[b], radius, radius, true));
  return found;
}

function ringEdges({ nodes, cx, cy, reach, radius }, num) {
  const gap = (radius + 5) / reach;
  return nodes.map((node, rank) => {
    const [from, to] = [node.angle + gap, node.angle + (2 * Math.PI) / num - gap - 4 / reach];
    const at = (angle) => `${fixed(cx + reach * Math.cos(angle))} ${fixed(cy + reach * Math.sin(angle))}`;
    const path = `M${at(from)} A${fixed(reach)} ${fixed(reach)} 0 ${to - from > Math.PI ? 1 : 0} 1 ${at(to)}`;
    return { from: rank, to: (rank + 1) % num, path, both: false };
  });
}

function asTree(plan, width, radius) {
  const children = (rank) => {
    const found = [];
    for (let reach = 1; rank + reach < plan.num && (rank === 0 || reach < (rank & -rank)); reach *= 2) found.push(rank + reach);
    return found;
  };
  const depth = (rank) => (rank === 0 ? 0 : 1 + depth(rank - (rank & -rank)));
  const nodes = new Array(plan.num);
  let leaves = 0;
  const settle = (rank) => {
    const below = children(rank).map(settle);
    const x = below.length ? (below[0] + below[below.length - 1]) / 2 : leaves++;
    nodes[rank] = { x, depth: depth(rank) };
    return x;
  };
  settle(0);
  const levels = Math.max(...nodes.map((node) => node.depth));
  const height = Math.round(Math.min(360, Math.max(220, (levels + 1) * 84)));
  const side = radius + 30;
  for (const node of nodes) {
    node.x = leaves > 1 ? side + (node.x / (leaves - 1)) * (width - 2 * side) : width / 2;
    node.y = levels ? radius + 22 + (node.depth / levels) * (height - 2 * radius - 48) : height / 2;
  }
  const edges = nodes.flatMap((node, rank) => (rank ? [line(rank, rank - (rank & -rank), node, nodes[rank - (rank & -rank)], radius, radius, true)] : []));
  return { height, radius, nodes, servers: [], hub: null, edges };
}

function withServers(plan, width, radius) {
  const gap = plan.servers > 6 ? 6 : 14;
  const w = Math.min(132, (width - gap * (plan.servers + 1)) / plan.servers);
  const h = 62;
  const start = (width - plan.servers * w - (plan.servers - 1) * gap) / 2;
  const servers = Array.from({ length: plan.servers }, (_, k) => ({ x: start + k * (w + gap), y: 16, w, h }));
  const perRow = Math.max(1, Math.min(plan.num, Math.floor((width - 16) / (2 * radius + 20))));
  const rows = Math.ceil(plan.num / perRow);
  const height = Math.round(Math.max(280, h + 150 + rows * (2 * radius + 26)));
  const base = height - radius - 24 - (rows - 1) * (2 * radius + 26);
  const nodes = Array.from({ length: plan.num }, (_, rank) => {
    const row = Math.floor(rank / perRow);
    const inRow = Math.min(perRow, plan.num - row * perRow);
    const step = Math.min((width - 16) / inRow, 110);
    return { x: width / 2 + (rank - row * perRow - (inRow - 1) / 2) * step, y: base + row * (2 * radius + 26) };
  });
  const edges = [];
  nodes.forEach((node, rank) => servers.forEach((server, k) => {
    const [x0, y0, x1, y1] = [node.x, node.y - radius - 4, server.x + server.w / 2, server.y + server.h + 4];
    const bend = (y0 - y1) * 0.45;
    edges.push({
      from: rank, to: `server ${k}`, both: true,
      path: `M${fixed(x0)} ${fixed(y0)} C${fixed(x0)} ${fixed(y0 - bend)} ${fixed(x1)} ${fixed(y1 + bend)} ${fixed(x1)} ${fixed(y1)}`,
    });
  }));
  return { height, radius, nodes, servers, hub: null, edges };
}

// Who exchanges with whom by recursive halving; ranks beyond a power of two fold into their neighbours.
function pairs(num) {
  const power = 2 ** Math.floor(Math.log2(num));
  const folded = num - power;
  const rankOf = (place) => (place < folded ? 2 * place : place + folded);
  const found = Array.from({ length: folded }, (_, place) => [2 * place + 1, 2 * place]);
  for (let distance = power / 2; distance >= 1; distance /= 2) {
    for (let place = 0; place < power; place += 1) if (!(place & distance)) found.push([rankOf(place), rankOf(place ^ distance)]);
  }
  return found;
}

function allPairs(num) {
  const found = [];
  for (let a = 0; a < num; a += 1) for (let b = a + 1; b < num; b += 1) if (num <= 8 || b - a === 1 || (a === 0 && b === num - 1)) found.push([a, b]);
  return found;
}

function line(from, to, a, b, before, after, both) {
  const far = Math.hypot(b.x - a.x, b.y - a.y) || 1;
  const [ux, uy] = [(b.x - a.x) / far, (b.y - a.y) / far];
  const [start, end] = [before + 5, after + 6];
  return { from, to, both, path: `M${fixed(a.x + ux * start)} ${fixed(a.y + uy * start)} L${fixed(b.x - ux * end)} ${fixed(b.y - uy * end)}` };
}

function fixed(value) {
  return value.toFixed(1);
}
