package graph

import (
	"fmt"
	"strings"
)

// Fonts have a fixed width, so that the layout knows how wide a text is without asking anybody: 0.602 em in all
// common ones.
const (
	smallFont, largeFont  = 11, 13 // pixels
	smallWidth, smallRise = 6.7, 4 // of one column; from the middle of a line to its base
)

// The style holds for light and dark backgrounds; the picture brings its own background, so text is readable
// wherever it is put.
const svgStyle = `<style>
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328}
.h{font-size:18px;font-weight:bold}.n{font-size:13px;font-weight:bold}.s{font-weight:bold}.m{fill:#59636e}
.e{text-anchor:end}.c{text-anchor:middle}
.bg{fill:#fff}.site{fill:#f6f8fa;stroke:#d1d9e0}.card{fill:#fff;stroke:#afb8c1}
.unseen{stroke-dasharray:4 3;stroke:#cf222e}
.w{fill:none;stroke-width:2}.t{font-weight:bold}
.direct{stroke:#1a7f37}.relay{stroke:#9a6700}.hop{stroke:#8250df}
.down{stroke:#cf222e}.unknown,.none{stroke:#818b98}.self{stroke:#0969da}
.relay.w{stroke-dasharray:9 4}.hop.w{stroke-dasharray:12 3 3 3}
.down.w{stroke-dasharray:2 4}.unknown.w{stroke-dasharray:1 6}
.fdirect{fill:#1a7f37}.frelay{fill:#9a6700}.fhop{fill:#8250df}
.fdown{fill:#cf222e}.funknown,.fnone{fill:#818b98}.fself{fill:#0969da}
.x{fill:none;stroke:#818b98;stroke-width:1;stroke-dasharray:1 2}.a{fill:#818b98}
.l{stroke:#8250df;fill:none}.lleader{fill:#8250df}.lelected{stroke-dasharray:2 1}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.m{fill:#9198a1}.bg{fill:#0d1117}.site{fill:#151b23;stroke:#3d444d}.card{fill:#0d1117;stroke:#656c76}
.unseen{stroke:#f85149}
.direct{stroke:#3fb950}.relay{stroke:#d29922}.hop{stroke:#ab7df8}
.down{stroke:#f85149}.unknown,.none{stroke:#9198a1}.self{stroke:#4493f8}
.fdirect{fill:#3fb950}.frelay{fill:#d29922}.fhop{fill:#ab7df8}
.fdown{fill:#f85149}.funknown,.fnone{fill:#9198a1}.fself{fill:#4493f8}
.x{stroke:#9198a1}.a{fill:#9198a1}
.l{stroke:#ab7df8}.lleader{fill:#ab7df8}
}
</style>
`

// canvas gathers elements. Wires are drawn below boxes' contents and above the boxes, in the order of the three
// lists.
type canvas struct {
	boxes, wires, marks strings.Builder
	width, height       int
}

// reach makes the picture at least so large.
func (c *canvas) reach(x, y int) { c.width, c.height = max(c.width, x), max(c.height, y) }

func (c *canvas) box(class string, x, y, w, h, radius int) {
	c.reach(x+w, y+h)
	put(&c.boxes, `<rect class="%s" x="%d" y="%d" width="%d" height="%d" rx="%d"/>`, class, x, y, w, h, radius)
}

// text writes a line whose middle is at y; x is its beginning, or its end with the class e.
func (c *canvas) text(class string, x, y int, s string) {
	if s == "" {
		return
	}
	if !strings.HasPrefix(class, "e") && !strings.HasPrefix(class, "c") {
		c.reach(x+int(float64(cells(s))*smallWidth), y)
	}
	put(&c.marks, `<text class="%s" x="%d" y="%d">%s</text>`, class, x, y+smallRise, xmlText(s))
}

// wire draws a path line: a curve from one point to another and straight on to endX.
func (c *canvas) wire(s State, thick, x0, y0, x1, y1, endX int) {
	style := ""
	if thick != 2 {
		style = fmt.Sprintf(` style="stroke-width:%d"`, thick)
	}
	m := (x0 + x1) / 2
	put(&c.wires, `<path class="w %s"%s d="M%d %dC%d %d %d %d %d %dH%d"/>`, s, style, x0, y0, m, y0, m, y1, x1, y1, endX)
}

// state is a small sign, so that colour is not all that tells states apart.
func (c *canvas) state(s State, x, y int) {
	switch s {
	case Direct:
		put(&c.marks, `<circle class="fdirect" cx="%d" cy="%d" r="4"/>`, x, y)
	case Relay:
		put(&c.marks, `<circle class="relay" fill="none" stroke-width="2" cx="%d" cy="%d" r="3.5"/>`, x, y)
	case Hop:
		put(&c.marks, `<path class="fhop" d="M%d %dl5 5-5 5-5-5z"/>`, x, y-5)
	case Down:
		put(&c.marks, `<path class="down" stroke-width="2" d="M%d %dl8 8m0-8l-8 8"/>`, x-4, y-4)
	case Unknown:
		put(&c.marks, `<text class="c t" x="%d" y="%d">?</text>`, x, y+smallRise)
	case None:
		put(&c.marks, `<path class="none" stroke-width="2" d="M%d %dh8"/>`, x-4, y)
	case Self:
		put(&c.marks, `<rect class="fself" x="%d" y="%d" width="8" height="8"/>`, x-4, y-4)
	}
}

var leadClasses = [...]string{Leader: "l lleader", Reserve: "l", Elected: "l lelected"}

// lead is the star of a site's leader: full, hollow for a reserve, dashed while it does not act.
func (c *canvas) lead(l Lead, x, y int) {
	put(&c.marks, `<path class="%s" d="M%d %dl2 4 4 1-3 3 1 4-4-2-4 2 1-4-3-3 4-1z"/>`, leadClasses[l], x, y-6)
}

// tip begins a group with a tooltip; end ends it.
func (c *canvas) tip(s string) { c.marks.WriteString("<g><title>" + xmlText(s) + "</title>\n") }
func (c *canvas) end()         { c.marks.WriteString("</g>\n") }

func (c *canvas) String() string {
	w, h := c.width+margin, c.height+margin
	var out strings.Builder
	put(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img">`, w, h, w, h)
	out.WriteString(svgStyle)
	put(&out, `<rect class="bg" width="%d" height="%d"/>`, w, h)
	return out.String() + c.boxes.String() + c.wires.String() + c.marks.String() + "</svg>\n"
}
