package replace

import "fmt"

// Kinds of controllers whose next pod can be told more exactly than by its controller, or that may end without one.
const (
	statefulSet = "StatefulSet" // the next one has the same name
	daemonSet   = "DaemonSet"   // the next one is on the same node
	job         = "Job"         // the next one may end as well, and after a success there is none
)

// view is what is known of pods: of those of a plan, and of those of their controllers. It keeps no others.
type view struct {
	controllers map[string]bool // UIDs
	wanted      map[string]bool // UIDs of the plan's pods
	now         map[string]Pod  // by UID
	ended       map[string]Pod  // of the plan's, as they were seen last
}

func viewOf(p Plan) *view {
	v := &view{controllers: map[string]bool{}, wanted: map[string]bool{}, now: map[string]Pod{}, ended: map[string]Pod{}}
	for _, s := range p.Steps {
		for _, pod := range s.Pods {
			v.wanted[pod.UID] = true
			if uid := pod.Controller.UID; uid != "" {
				v.controllers[uid] = true
			}
		}
	}
	return v
}

// keeps reports whether a pod matters.
func (v *view) keeps(p Pod) bool { return v.wanted[p.UID] || v.controllers[p.Controller.UID] }

// set notes a pod as it is.
func (v *view) set(p Pod) {
	if v.keeps(p) {
		v.now[p.UID] = p
	}
}

// gone notes that a pod is not there any more, as it was last.
func (v *view) gone(p Pod) {
	delete(v.now, p.UID)
	if v.wanted[p.UID] {
		v.ended[p.UID] = p
	}
}

// list notes all pods that there are.
func (v *view) list(pods map[string]Pod) {
	for uid, p := range v.now {
		if _, there := pods[uid]; !there {
			v.gone(p)
		}
	}
	for _, p := range pods {
		v.set(p)
	}
}

// of are the pods of a controller, by UID.
func (v *view) of(c Controller) map[string]bool {
	out := map[string]bool{}
	for uid, p := range v.now {
		if p.Controller.UID == c.UID {
			out[uid] = true
		}
	}
	return out
}

// progress is how far the replacement of a pod is.
type progress struct {
	gone bool // the old one is
	done bool // gone, and another one does what it did, or none has to
	next *Pod // that other one, as far as it has come; nil: there is none
}

// progress tells how far the replacement of a pod is. Pods of before, by UID, were there before it was evicted, and are
// not the ones that come for it. None has to come for a pod without a controller, and for a Job's that has succeeded.
func (v *view) progress(old Pod, before map[string]bool) (out progress) {
	_, there := v.now[old.UID]
	out.gone = !there
	for _, p := range v.now {
		if before[p.UID] || !comesFor(old, p) {
			continue
		}
		works := works(p)
		if out.next == nil || works {
			out.next = &p
		}
		if works {
			break
		}
	}
	needless := old.Controller == Controller{} || old.Controller.Kind == job && v.ended[old.UID].Succeeded
	out.done = out.gone && (needless || out.next != nil && works(*out.next))
	return out
}

func works(p Pod) bool { return p.Ready || p.Controller.Kind == job && p.Succeeded }

// comesFor reports whether a pod does what another one did. The apiserver takes any controller that a pod names, so one
// of another namespace is not believed.
func comesFor(old, p Pod) bool {
	switch {
	case old.Controller.UID == "" || p.Controller.UID != old.Controller.UID:
		return false
	case p.UID == old.UID || p.Namespace != old.Namespace:
		return false
	case old.Controller.Kind == statefulSet:
		return p.Name == old.Name
	case old.Controller.Kind == daemonSet:
		return p.Node == old.Node
	}
	return true
}

// lacks says what is missing.
func (p progress) lacks(old Pod) string {
	switch {
	case !p.gone:
		return "it was evicted, and has not ended"
	case p.next == nil:
		return fmt.Sprintf("it has ended, and %s has started no other pod", old.Controller)
	}
	return fmt.Sprintf("it has ended, and %s of %s is not ready", *p.next, old.Controller)
}
