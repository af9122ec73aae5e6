package pool

import "time"

// Maker chooses the account for a request that makes an object, so that a
// caller's objects are in one account. It chooses only among members that are
// equally good for the request.
//
// With an Order, accounts are tried like this: Home, then Last, then all others
// in the order of that key. With Order 0, only Home is preferred, while it has
// room by the rules of [Affinity]. Otherwise, any member gets the request.
type Maker struct {
	// Home is the account of the caller's objects. Last is the account where
	// the caller started its latest object. Each is empty if it is not known.
	Home, Last string
	// Order is the key by which the remaining accounts are ordered, by their
	// random weights for the key. So each account is the first one for its
	// share of the keys. It is 0 if no account but Home is preferred.
	Order uint64
	// Chosen reports whether the account decided the latest pick.
	Chosen bool
}

// soon is the longest time that a request may be told to wait for an account.
const soon = time.Minute

// IsSoonBack reports whether the account throttles or is full, and will be back
// within a minute. It reports false if a member of the account is ready, or if
// another account has a ready member of a better priority.
func (p *Pool) IsSoonBack(r *Ask, account string, now time.Time) (back bool) {
	var best *Member // of other accounts, among those that may be called
	for _, m := range p.Members {
		at := &r.At[m.Index]
		if !at.takes() || m.Drained() || m.Unreachable() {
			continue
		}
		away := m.Full() || m.Throttles(r, now)
		switch {
		case m.Account != account:
			if best == nil && !away && r.mayTry(at) {
				best = m
			}
		case !away:
			return false
		case best == nil || best.Priority >= m.Priority:
			back = back || m.returns(r, now).Sub(now) < soon
		}
	}
	return back
}

// account is the account of a member, with the data that its members share.
type account struct {
	name   string
	digest digest
	// weight is the sum of the configured weights of the account's members of
	// the same priority.
	weight float64
}

func (p *Pool) findAccounts() {
	for _, m := range p.Members {
		m.account = account{name: m.Account, digest: digestOf(m.Account)}
		for _, other := range p.Members {
			if other.Account == m.Account && other.Priority == m.Priority {
				m.account.weight += other.configuredShare()
			}
		}
	}
}

// score returns the account's position in the maker's order: the lowest score
// comes first. ok is false if the account has no position.
func (k *Maker) score(a *account, weight float64) (score float64, ok bool) {
	switch {
	case a.name == k.Home:
		return -2, true
	case k.Order == 0:
		return 0, false
	case a.name == k.Last:
		return -1, true
	}
	return a.digest.score(k.Order, weight), true
}

// chooseForMaker finds the first account in the maker's order that has a member
// of the best grade, and chooses one of that account's members by weight. It
// returns nil if the maker's order does not decide.
func (p *Pool) chooseForMaker(r *Ask, k *Maker, now time.Time, best grade) (chosen *Member) {
	var group peers
	var account string
	var lowest float64
	for m := range p.peers(best, r, now) {
		group.weights += r.share(m)
		group.inFlight += m.InFlight()
		if score, ok := k.score(&m.account, r.accountShare(m)); ok && (account == "" || score < lowest) {
			account, lowest = m.Account, score
		}
	}
	total := 0.0
	for m := range p.peers(best, r, now) {
		if m.Account != account || account == "" || k.Order == 0 && !group.place(r, m).hasRoom() {
			continue
		}
		if total += r.share(m); chosen == nil || Random()*total < r.share(m) {
			chosen = m
		}
	}
	k.Chosen = chosen != nil
	return chosen
}
