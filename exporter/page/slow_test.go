package page

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// slowReader is a client that does not read until it may.
type slowReader struct {
	*httptest.ResponseRecorder
	writing chan int // bytes
	may     chan struct{}
}

func (s slowReader) Write(p []byte) (int, error) {
	select {
	case <-s.may:
	default:
		s.writing <- len(p)
		<-s.may
	}
	return s.ResponseRecorder.Write(p)
}

// TestSlowReadersOfHistory: the histories of many containers that clients have not read yet are bounded, and who comes then is told so.
func TestSlowReadersOfHistory(t *testing.T) {
	s := New(func() *snapshot.Snapshot { return &snapshot.Snapshot{} })
	for second := range 600 {
		v := &view.Snapshot{Time: time.Unix(1_800_000_000+int64(second), 0)}
		for i := range 500 {
			v.Workloads = append(v.Workloads, view.Workload{ContainerID: fmt.Sprint(i), PID: i + 1, Utilization: frame.Some(float64(second%97) + 0.123), Memory: frame.Some(uint64(second))})
		}
		s.history.Add(v)
	}
	mux := http.NewServeMux()
	s.Register(mux)
	ask := func(w http.ResponseWriter) {
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/v1/history", nil))
	}
	writing, may := make(chan int), make(chan struct{})
	var clients sync.WaitGroup
	held, answered := 0, 0
	for {
		w := slowReader{httptest.NewRecorder(), writing, may}
		clients.Go(func() { ask(w) })
		size := <-writing
		if w.Code != http.StatusOK {
			break
		}
		if size < 1<<20 {
			t.Fatalf("an answer of %d bytes: the test shows nothing", size)
		}
		held += size
		if answered++; held > maxUntaken+size {
			t.Errorf("%d clients hold %d MB", answered, held>>20)
			break
		}
	}
	if answered < 3 {
		t.Errorf("only %d slow readers are answered", answered)
	}
	close(may)
	clients.Wait()
	w := httptest.NewRecorder()
	if ask(w); w.Code != http.StatusOK {
		t.Errorf("after all have read: %d", w.Code)
	}
}
