// Colours of the charts are those of the page, light or dark, and light on paper. On a touch screen a finger scrolls.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)"), touch = matchMedia("(pointer: coarse)");
  const models = () => Bokeh.documents.flatMap((d) => [...d._all_models.values()]);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const paint = (fg = colour("--soft"), grid = colour("--grid")) => {
    for (const model of models()) {
      if (model.type.endsWith("Axis"))
        model.setv({ axis_label_text_color: fg, major_label_text_color: fg, axis_line_color: fg, major_tick_line_color: fg });
      else if (model.type === "Grid" && model.grid_line_color !== null) model.grid_line_color = grid;
      else if (model.type === "Toolbar" && touch.matches && model.active_drag !== null) {
        model.active_drag = null;
        for (const tool of model.tools) if ("active" in tool && tool.type !== "HoverTool") tool.active = false;
      }
    }
  };
  const begin = () => {
    if (!window.Bokeh || !Bokeh.documents.length) return void setTimeout(begin, 5);
    paint();
    dark.addEventListener("change", () => paint());
    addEventListener("beforeprint", () => paint("#5a6068", "#e3e6ea"));
    addEventListener("afterprint", () => paint());
    const drawn = () => (document.documentElement.dataset.drawnMs = Math.round(performance.now()));
    const wait = () => (Bokeh.documents.every((d) => d.is_idle) ? drawn() : setTimeout(wait, 5));
    wait();
  };
  document.readyState === "loading" ? addEventListener("DOMContentLoaded", begin) : begin();
})();
